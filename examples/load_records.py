"""Three questions to the data set that `tools/export_tables.py DIR` writes: python examples/load_records.py DIR"""

import sys

import pandas as pd

runs, claims, releases = (
    pd.read_parquet(f"{sys.argv[1]}/data/{name}.parquet") for name in ("runs", "claims", "releases")
)
same = runs[(runs.protocol == "smoke") & (runs.model == "gpt-tiny") & (runs.kind == "real") & (runs.status == "done")]
print("What does a rank hold at its peak, in MB?", same.groupby("arm").tracked_peak_bytes.median() / 1e6, sep="\n")
failing = claims[(claims.verdict == "does not hold") & (claims.certainty == "high")]
print("Which claims surely do not hold?", ", ".join(failing.id))
wrong = releases[releases.kind == "differs"].groupby(["adapter", "deepspeed", "accelerate"]).property.nunique()
print("How many properties are wrong with a release, without a message?", wrong, sep="\n")
