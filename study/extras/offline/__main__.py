"""`python3 -m study.extras.offline`, with Python's own library only: the same as `study offline`."""

from study.extras.offline.run import main

main()
