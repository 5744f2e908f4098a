"""Rules that name mistakes in what enters the loss: targets, padding, special tokens, and the layer before it.

Shares are of the micro-batches that the watch has read, so each rule needs enough of what it judges.
"""

from study.watch.facts import Facts, Results, required

ALIKE = 0.9
ENOUGH = 64  # targets
FEW_ENDS = 8
LITTLE = 0.02  # of the targets
MANY = 0.1  # of the rows
MOST = 0.5
FEW_READ = 6  # micro-batches
UNIFORM = 0.8  # of them
UNKNOWN = 0.2  # of the tokens: rare words of a language are a few of a hundred
# Heads of transformers that a task adds to a model, with first weights that know nothing.
ADDED = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice", "ImageClassification")


def function(facts: Facts) -> Results:
    """Name a loss that gets what it does not take."""
    seen = facts.watched.targets
    if seen.probabilities:
        yield "probabilities_as_logits", {"function": seen.probabilities}
    if seen.no_logarithms > MOST * seen.read:
        yield "no_logarithms"
    if seen.mixed > MOST * seen.read:
        yield "view_for_transpose"
    if seen.broadcast > MOST * seen.read:
        yield "loss_broadcasts"


def targets(facts: Facts) -> Results:
    """Name targets that are ignored, or all alike."""
    seen = facts.watched.targets
    total = seen.counted + seen.ignored
    if total and not seen.counted:
        yield "targets_ignored", {"total": total}
    elif seen.rows and seen.rows_ignored >= MANY * seen.rows:
        yield "rows_without_targets", {"share": seen.rows_ignored / seen.rows}
    elif seen.read and seen.without_targets >= MOST * seen.read:
        yield "rows_without_targets", {"share": seen.without_targets / seen.read}


def classes(facts: Facts) -> Results:
    """Name rows that come sorted by their class: each micro-batch has one alone, and not always the same."""
    seen = facts.watched.targets
    # Rows of which almost all are of one class have micro-batches of that one, and hardly any of another.
    if seen.read >= FEW_READ and len({*seen.uniform}) > 1 and len(seen.uniform) >= UNIFORM * seen.read:
        yield "rows_sorted", {"count": seen.read}


def places(facts: Facts) -> Results:
    """Name targets of tokens that are not the next ones."""
    seen = facts.watched.targets
    if min(seen.compared) < ENOUGH:
        return
    same, following, second = (now / most for now, most in zip(seen.equal, seen.compared, strict=True))
    if following >= MOST:
        return
    if second >= ALIKE and same < MOST:
        yield "targets_shifted_twice", {"share": second}
    if same >= ALIKE and second < MOST:
        yield "targets_are_inputs", {"share": same}


def padding(facts: Facts) -> Results:
    """Name padding that is learned, or seen."""
    seen = facts.watched.targets
    if seen.counted and seen.padding >= LITTLE * seen.counted:
        yield "padding_in_loss", {"share": seen.padding / seen.counted}
    if seen.read and seen.unmasked >= MOST * seen.read:
        yield "padding_unmasked"
    if seen.tokens and seen.hidden >= MOST * seen.tokens:
        yield "tokens_hidden", {"share": seen.hidden / seen.tokens}


def special_tokens(facts: Facts) -> Results:
    """Name beginnings that stand twice, ends that no loss teaches, words that nobody knows, and places."""
    seen = facts.watched.targets
    if seen.rows and seen.two_starts >= MOST * seen.rows:
        yield "two_starts", {"share": seen.two_starts / seen.rows}
    if seen.ends >= FEW_ENDS and not seen.ends_learned:
        yield "ends_not_learned", {"ends": seen.ends}
    if seen.positions_alike and seen.positions_alike >= MOST * seen.read:
        yield "positions_alike"
    if seen.tokens >= ENOUGH and seen.unknown >= UNKNOWN * seen.tokens:
        yield "tokens_unknown", {"share": seen.unknown / seen.tokens}


def head(facts: Facts) -> Results:
    """Name a last layer that does not train above layers that do."""
    watched = facts.watched
    name = required(watched.head)
    is_added = any(each in (watched.model or "") for each in ADDED)
    trains_most = required(facts.seen.trained_parameters) > MOST * facts.parameters
    if not watched.head_trains and (trains_most or (watched.has_adapters and is_added)):
        yield "head_frozen", {"name": name, "new": ", with its first weights" if is_added else ""}


def adapters(facts: Facts) -> Results:
    """Name adapters beside which all other weights train as well, or that do not train."""
    if facts.watched.has_adapters and required(facts.seen.trained_parameters) == facts.parameters:
        yield "adapters_and_all"
    if facts.watched.adapters_train is False:
        yield "adapters_frozen"


def units(facts: Facts) -> Results:
    if facts.watched.units_alike:
        yield "units_alike", {"names": ", ".join(facts.watched.units_alike)}


def data_sets(facts: Facts) -> Results:
    if facts.watched.evaluated_on_trained:
        yield "evaluated_on_trained"


ENTERED = (function, targets, classes, places, padding, special_tokens, head, adapters, units, data_sets)
