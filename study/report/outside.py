"""How accurate predictions are of trainings that others published, in two sentences."""

from study.core.text import percent
from study.predict.front import published, scores


def accuracy() -> str:
    """Return how accurate predictions are of trainings that decided nothing. All rows weigh the same.

    Seconds are those of the newest set, by today's model: it was fitted to all others. Bytes are those of all frozen
    sets, each as it was predicted at first. Refused rows have no error.
    """
    everything = scores.numbers()
    newest = max(published.set_number(each.set) for each in everything)
    unseen = [each for each in everything if published.set_number(each.set) == newest]
    time = scores.score([each for each in unseen if each.quantity == "time"])
    peak = scores.score([each for each in everything if each.quantity == "memory"], "first")
    return (
        f"Of the newest step times of others, to which nothing was fitted, half are predicted within "
        f"{percent(time['median error'])}, and {percent(time['near'])} within {scores.NEAR['time']:.0%}. Half of the "
        f"memory peaks were within {percent(peak['median error'])} when they were first predicted, but "
        f"{percent(peak['too low'])} were more than {scores.TOO_LOW:.0%} too low: leave room, and run ten steps "
        "before you rely on a time."
    )
