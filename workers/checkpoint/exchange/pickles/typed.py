"""Plain values that remember their class, for classes that training scripts save beside tensors.

A checkpoint stores a dict, a text or a tuple for them; an export creates the original class again.
"""

from collections import OrderedDict
from typing import Any, ClassVar


class TypedValue:
    """Base class. `tag` is the leaf in a form (sources/source_form.py), `plain` the type that an entry stores."""

    tag: ClassVar[str]
    plain: ClassVar[type]

    def content(self) -> Any:
        """Return the plain value."""
        return self.plain(self)

    def form(self) -> Any:
        """Return the content of the leaf."""
        return self.content()


class Namespace(TypedValue, dict[Any, Any]):
    tag, plain = "$namespace", dict


class PathText(TypedValue, str):
    tag, plain = "$path", str


class TorchSize(TypedValue, tuple[int, ...]):
    tag, plain = "$size", tuple


class DtypeName(TypedValue, str):
    tag, plain = "$dtype", str


class DeviceName(TypedValue, str):
    tag, plain = "$device", str


class ModuleState(TypedValue, OrderedDict[Any, Any]):
    """A state dict with the versions of its modules, which torch keeps in `_metadata`."""

    tag, plain = "$module_state", OrderedDict
    versions: Any = None

    def form(self) -> Any:
        return [self.content(), self.versions]
