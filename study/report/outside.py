"""How accurate predictions are of trainings that others published, in a sentence."""

from statistics import mean, median

from study.io.numbers import percent
from study.predictor.front import scores


def accuracy() -> str:
    """Return in a sentence how accurate predictions were of trainings that the predictor had not met.

    Over all frozen rows, each as it was predicted at first; refused rows have no error. All rows weigh the same.
    """
    times, peaks = (
        scores.errors([each for each in scores.numbers() if each.quantity == quantity], "first")
        for quantity in ("time", "memory")
    )
    times = [*map(abs, times)]
    too_low = percent(mean(each < -scores.TOO_LOW for each in peaks))
    near, off = percent(mean(each <= 1 / 3 for each in times)), percent(median(map(abs, peaks)))
    return (
        f"On trainings that it had never seen, half of {len(times)} predicted step times were within "
        f"{percent(median(times))} of the measured one, and {near} within a third; "
        f"half of {len(peaks)} memory peaks were within {off}, but "
        f"{too_low} were more than {scores.TOO_LOW:.0%} too low: leave room, and run ten steps "
        "before you rely on a time."
    )
