"""What takes the place of a function that is left out, or of an operator in C++ that is not built."""


class Nothing:
    """It can be called, and has every attribute and item. Each is nothing again."""

    def __getattr__(self, name: str) -> "Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_, **__) -> "Nothing":
        return self

    def __getitem__(self, _) -> "Nothing":
        return self
