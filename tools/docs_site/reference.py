"""The API reference, from signatures and docstrings, which are written in markdown: a page for
each module, which lists its names, and one for each name."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from sources import BadSource, title_of

import unisono
import unisono.plan
import unisono.plan.layouts
import unisono.pytest_plugin
import unisono.testing
import unisono.training

_METHODS = (property, staticmethod, classmethod, FunctionType)
_DATA = {
    "unisono.plan.COLLECTIVES": "The names of the collectives that a schedule can be of.",
    "unisono.plan.PRESETS": "Topologies by name, with where their numbers come from (`source`).",
}
"""What has no docstring of its own."""
_DOCS = Path(__file__).parents[2] / "docs"
_ARGUMENT = "algorithm"
"""A name that in docstrings means an argument."""
_PAGES = 4
"""How many pages an entry leads to."""
_TYPES = """(types-in-signatures)=
## Types in signatures

| name | what it is |
|---|---|
| `Tensor` | a torch tensor or a NumPy array |
| `Tensors` | a `Tensor`, or a list or tuple of them |
| `TensorT` | a `Tensor`; the result has the type of the argument |
| `StructureT` | a tensor, a number, or a dict, list, tuple or dataclass of them; the result has the type of the argument |
| `OutT` | the type of `out`, which is what the call returns |
| `Op` | `"sum"`, `"mean"` (`"avg"`), `"product"` (`"prod"`), `"min"`, `"max"`, `"band"`, `"bor"`, `"bxor"`, a `torch.distributed.ReduceOp` or a `PremulSum` |
| `Group` | a `Communicator`, a torch process group, or None: the world |
| `Rank` | a rank of the group, or None: rank 0 |
| `Algorithm` | a name of `unisono.plan.catalog`, a `Schedule`, or None: the engine's own |
| `Work[T]` | a call under way: its `wait()` returns a T |

Type checkers know all of it: mypy and pyright find the right overload for `async_op=True` and for `out`.

"""  # noqa: E501


def write_pages(source: Path) -> list[str]:
    """Write the reference below `source`; returns the names of the modules' pages.

    Raises BadSource if a public name has no docstring.
    """
    names = []
    for title, (module, members) in _modules().items():
        text = f"# {title}\n\n{_opening(module)}\n"
        for heading, names_of_kind in _by_kind(module, members).items():
            text += f"## {heading}\n\n| | |\n|---|---|\n"
            for member in names_of_kind:
                value = getattr(module, member)
                told = _first_sentence(f"{title}.{member}", value)
                text += f"| [{member}]({title}.{member}.md) | {told} |\n"
                entry = "".join(_entry(title, member, value))
                entry += f"\n{_shown_in(source, title, member)}\n"
                _write(source, f"{title}.{member}", f"# {title}.{member}\n\n{entry}")
            text += "\n"
        listed = "".join(f"{member} <{title}.{member}>\n" for member in members)
        text += f"```{{toctree}}\n:hidden:\n\n{listed}```\n\n"
        names.append(_write(source, title, text + (_TYPES if module is unisono else "")))
    names.append(_write(source, "unisono.testing", _testing()))
    return names


@cache
def _modules() -> dict[str, tuple[ModuleType, list[str]]]:
    """The modules that have a page, with their names."""
    names = [name for name in unisono.__all__ if isinstance(getattr(unisono, name), ModuleType)]
    return {
        "unisono": (unisono, [name for name in unisono.__all__ if name not in names]),
        **{f"unisono.{name}": _of_module(getattr(unisono, name)) for name in names},
        "unisono.training": _of_module(unisono.training),
        "unisono.plan": _of_module(unisono.plan),
        "unisono.plan.layouts": _of_module(unisono.plan.layouts),
    }


def _names_of(title: str) -> list[str]:
    return _modules()[title][1] if title in _modules() else []


def _of_module(module: ModuleType) -> tuple[ModuleType, list[str]]:
    return module, sorted(module.__all__)


def _by_kind(module: ModuleType, members: list[str]) -> dict[str, list[str]]:
    """The names by what they are; what people look for most comes first."""
    found: dict[str, list[str]] = {"Functions": [], "Classes": [], "Exceptions": [], "Data": []}
    for name in members:
        value = getattr(module, name)
        if f"{module.__name__}.{name}" in _DATA:
            found["Data"].append(name)
        elif not isinstance(value, type):
            found["Functions"].append(name)
        else:
            found["Exceptions" if issubclass(value, Exception) else "Classes"].append(name)
    return {heading: names for heading, names in found.items() if names}


def _opening(module: ModuleType) -> str:
    """The first paragraph of a module's docstring: what follows is for those who read its files."""
    text = inspect.cleandoc(module.__doc__ or "")
    if not text:
        raise BadSource(f"{module.__name__} has no docstring")
    return _with_links(text.partition("\n\n")[0]) + "\n"


def _shown_in(source: Path, title: str, member: str) -> str:
    """The pages of the site that show a name most often."""
    call = re.compile(rf"(?<![\w.]){title}\.{member}\b|`{member}[`(]|\b{member}\(")
    pages = [page for page in sorted(source.glob("*.md")) if page.stem != "changelog"]
    shown = {page: len(call.findall(page.read_text())) for page in pages}
    most = sorted((page for page in pages if shown[page]), key=lambda page: -shown[page])
    links = map(_link, most[:_PAGES])
    types = "{ref}`types-in-signatures` explains the names of types."
    return types + (f" Shown in {', '.join(links)}." if most else "")


def _first_sentence(full: str, value: Any) -> str:
    """What a name is, in the table of its module."""
    told = _DATA.get(full) or as_markdown(_docstring(full, value), full).partition("\n\n")[0]
    plain = re.sub(r" \([^()]*:[^()]*\)", "", " ".join(told.split()))  # "(None: the world)"
    return re.split(r"(?<=[.:;])\s", plain, maxsplit=1)[0].rstrip(":;")


def _entry(prefix: str, name: str, value: Any) -> Iterator[str]:
    full = f"{prefix}.{name}"
    if full in _DATA:
        yield f"```{{py:data}} {full}\n{_DATA[full]}\n```\n\n"
        return
    text = as_markdown(_docstring(full, value), full)
    if not isinstance(value, type):
        yield from _directive("py:function", _signatures(full, value), text, 4)
        return
    methods = "".join(_methods(full, value))
    kind = "py:exception" if issubclass(value, Exception) else "py:class"
    fields = "".join(_fields(full, value))
    shown = full if kind == "py:exception" else _signature(full, value)
    if kind == "py:exception":
        bases = ", ".join(f"`{base.__name__}`" for base in value.__mro__[1:-3])
        text += f"\nIts bases: {_with_names(bases, full, ['unisono'])}.\n"
    yield from _directive(kind, [shown], text + "\n" + fields + methods, 6)


def _methods(full: str, owner: type) -> Iterator[str]:
    ours = [base for base in reversed(owner.__mro__) if base.__module__.startswith("unisono.")]
    names = dict.fromkeys(name for base in ours for name in vars(base) if not name.startswith("_"))
    for name in names:
        found = inspect.getattr_static(owner, name)
        if not isinstance(found, _METHODS):
            continue
        text = as_markdown(_docstring(f"{full}.{name}", found), full)
        if isinstance(found, property):
            yield from _directive("py:property", [f"{full}.{name}"], text, 5)
        else:
            yield from _directive("py:method", _signatures(f"{full}.{name}", found), text, 5)


def _fields(full: str, owner: type) -> Iterator[str]:
    """The fields of a dataclass, in one line: its docstring says what they are."""
    if dataclasses.is_dataclass(owner):
        names = [f"`{f.name}`" for f in dataclasses.fields(owner) if not f.name.startswith("_")]
        yield f"Fields: {', '.join(names)}.\n\n"


def _directive(kind: str, signatures: list[str], text: str, fence: int) -> Iterator[str]:
    """What is called in several ways has an entry for each; the last one has the text."""
    marks, last = ":" * fence, len(signatures) - 1
    for at, signature in enumerate(signatures):
        option = ":no-index:\n" if at else ""
        body = f"\n{text}\n" if at == last else ""
        yield f"{marks}{{{kind}}} {signature}\n{option}{body}{marks}\n\n"


def _docstring(full: str, value: Any) -> str:
    text = inspect.getdoc(value)
    if not text or (isinstance(value, type) and text == inspect.getdoc(object)):
        raise BadSource(f"{full} has no docstring")
    return text


def _signatures(full: str, value: Any) -> list[str]:
    """The ways to call a function: its overloads in the stub beside its module, if there is one.
    That for an `async_op` of either kind says nothing new."""
    function = inspect.unwrap(getattr(value, "__func__", value))
    file = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    found = _stub(Path(file).with_suffix(".pyi")).get(function.__qualname__, []) if file else []
    kept = [text for text in found if "async_op: bool" not in text] if len(found) > 1 else []
    return [full + text for text in kept] or [_signature(full, value)]


@cache
def _stub(path: Path) -> dict[str, list[str]]:
    """The signatures in a stub, by qualified name."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(path.read_text()).body if path.exists() else []:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for function in inner:
            if isinstance(function, ast.FunctionDef):
                arguments = function.args
                arguments.args = [arg for arg in arguments.args if arg.arg not in ("self", "cls")]
                returned = f" -> {ast.unparse(function.returns)}" if function.returns else ""
                text = f"({ast.unparse(arguments)}){returned}".replace("_Literal", "Literal")
                found.setdefault(prefix + function.name, []).append(text)
    return found


def _signature(full: str, value: Any) -> str:
    try:
        found = inspect.signature(getattr(value, "__func__", value))
    except (TypeError, ValueError):
        return full
    parameters = [
        _as_written(parameter)
        for parameter in found.parameters.values()
        if parameter.name not in ("self", "cls") and not parameter.name.startswith("_")
    ]
    returned = _unquoted(found.return_annotation)
    return full + str(found.replace(parameters=parameters, return_annotation=returned))


class _Words:
    """Words that stand in a signature as they are."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __repr__(self) -> str:
        return self._words


def _as_written(parameter: inspect.Parameter) -> inspect.Parameter:
    """A default that Python would not read again is shown as three dots."""
    default = parameter.default
    plain = (int, float, str, tuple, type(None), type(inspect.Parameter.empty))
    if not isinstance(default, plain):
        default = _Words("...")
    return parameter.replace(default=default, annotation=_unquoted(parameter.annotation))


def _unquoted(annotation: Any) -> Any:
    return _Words(annotation) if isinstance(annotation, str) else annotation


def as_markdown(docstring: str, full: str) -> str:
    """The text of a name's docstring, with links to other names, and its example as code."""
    told, prompt, example = docstring.partition(">>>")
    told, *also = re.split(r"(?=See\s+also\s)", told, maxsplit=1)
    told = _with_names(told, full, [full.rpartition(".")[0]])
    told += "".join(_with_names(names, full, _modules()) for names in also)
    text = _with_links(_escaped(told.rstrip())) + "\n"
    if prompt:
        text += f"\n```pycon\n{prompt}{example.rstrip()}\n```\n"
    return text


def _with_names(text: str, full: str, titles: Iterable[str]) -> str:
    """Names of these modules, and the modules' own, lead to their pages. Where several modules have
    a name, that of `full` is meant."""
    asked = sorted(titles, key=lambda title: (not full.startswith(f"{title}."), -len(title)))

    def lead(found: re.Match[str]) -> str:
        name = found[1]
        pages = [f"{title}.{name}" for title in asked if name in _names_of(title)]
        pages += [f"unisono.{name}"] * (f"unisono.{name}" in asked)
        return found[0] if not pages or pages[0] == full else f"[{found[0]}]({pages[0]}.md)"

    return re.sub(rf"`(?!{_ARGUMENT}`)(\w+)`", lead, text)


def _with_links(text: str) -> str:
    """What a docstring calls docs/hosts.md is that page, by its title."""
    return re.sub(r"docs/([\w-]+)\.md", lambda page: _link(_DOCS / f"{page[1]}.md"), text)


def _link(page: Path) -> str:
    return f"[{title_of(page)}](../{page.name})"


def _escaped(text: str) -> str:
    """What markdown would take for HTML stands as it is."""
    return re.sub(r"<(?=[a-zA-Z/!])", r"\\<", text)


def _testing() -> str:
    """The plugin: its mark and its fixtures."""
    text = f"# unisono.testing\n\n{_opening(unisono.testing)}\n"
    text += (
        "pytest finds the plugin by itself: [Tests on several ranks](../testing.md) shows it.\n\n"
    )
    plugin = unisono.pytest_plugin
    for name in ("comm", "process_group", "shared_tmp_path"):
        fixture = getattr(plugin, name)
        function = getattr(fixture, "_get_wrapped_function", lambda fixture=fixture: fixture)()
        full = f"unisono.pytest_plugin.{name}"
        text += f"## {name}\n\n"
        text += f"::::{{py:function}} {full}\n\nA fixture. {_docstring(full, function)}\n::::\n\n"
    return text


def _write(source: Path, title: str, text: str) -> str:
    name = f"reference/{title}"
    path = source / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return name
