"""What takes the place of a function that is left out, of an operator in C++, or of a package that keeps logs."""

import importlib.util
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec


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

    def __setitem__(self, *_) -> None:
        pass

    def __iter__(self):
        return iter(())

    def __enter__(self) -> "Nothing":
        return self

    def __exit__(self, *_) -> None:
        pass

    def __fspath__(self) -> str:
        return "nothing"


# Packages that keep logs. A training needs none of them.
LOGS = {
    "wandb", "tensorboard", "tensorboardX", "mlflow", "comet_ml", "swanlab", "trackio", "aim", "clearml", "neptune",
    "dvclive",
}  # fmt: skip


class MissingLogs:
    """Finds packages that keep logs where they are not installed, for the script alone: all in them is `Nothing`."""

    def __init__(self, asks: Callable[[], object]):
        self.asks = asks  # returns something if the script does, and no library
        self.missing = {name for name in LOGS if importlib.util.find_spec(name) is None}
        self.left_out: list[str] = []  # that it asked for

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        package = name.removeprefix("torch.utils.").partition(".")[0]
        if package not in self.missing or self.asks() is None:
            return None
        if package not in self.left_out:
            self.left_out.append(package)
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, _) -> None:
        pass

    def exec_module(self, module: types.ModuleType) -> None:
        nothing = Nothing()
        module.__getattr__ = nothing.__getattr__  # type: ignore[method-assign]
