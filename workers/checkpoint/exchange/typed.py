"""Values of a few classes that training scripts save beside tensors: plain values that remember their class.

What reads them for a checkpoint sees a dict, a text or a tuple; what writes the file again makes the class again.
"""

from collections import OrderedDict
from typing import Any, ClassVar


class Typed:
    """`tag` is the leaf of a form (source_form.py), `plain` the type that an entry has it as."""

    tag: ClassVar[str]
    plain: ClassVar[type]

    def content(self) -> Any:
        """The plain value."""
        return self.plain(self)

    def form(self) -> Any:
        """What the leaf holds."""
        return self.content()


class Namespace(Typed, dict[Any, Any]):
    tag, plain = "$namespace", dict


class PathText(Typed, str):
    tag, plain = "$path", str


class TorchSize(Typed, tuple[int, ...]):
    tag, plain = "$size", tuple


class DtypeName(Typed, str):
    tag, plain = "$dtype", str


class DeviceName(Typed, str):
    tag, plain = "$device", str


class ModuleState(Typed, OrderedDict[Any, Any]):
    """A state dict with the versions of its modules, which torch keeps in `_metadata`."""

    tag, plain = "$module_state", OrderedDict
    versions: Any = None

    def form(self) -> Any:
        return [self.content(), self.versions]
