"""Read what people paste: logs, errors, lists of packages, configs, their own words. One answer. Needs no torch."""
