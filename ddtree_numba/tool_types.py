"""Tool declarations as TypeScript, the form in which Kimi K2.5 and K2.6 were trained to read them.

The code published beside the tokenizer writes them and hands them to the chat template as
`tools_ts_str`. A function becomes a type; its parameters, a JSON Schema, an object:

    # Tools

    ## functions
    namespace functions {
    // what the function is described as
    type NAME = (_: {
      // what a field is described as
      // minimum: 1
      // Default: 3
      field: number,
      other?: "a" | "b"
    }) => any;
    }

Required fields come first, then optional ones, each by name. A definition that is referred to
("#/$defs/X") becomes `interface X`, the whole of the parameters ("#") `interface parameters`.
"""

import json
from typing import Any

INDENT = "  "
UNION = {"integer": "number", "object": "{}", "array": "Array<any>"}
UNION |= {kind: kind for kind in ("string", "number", "boolean", "null")}
LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
VALUES: dict[str, Any] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


def typescript(tools: list[Any]) -> str | None:
    """All functions among the tools; None for a schema that has no such form.

    The template then gets the tools alone, as from the published code.
    """
    try:
        functions = [
            function_type(tool["function"])
            for tool in tools
            if tool.get("type") == "function" and tool.get("function")
        ]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
    if not functions:
        return ""
    body = "\n".join(functions)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{body}\n}}\n"


def sorted_keys(value: Any) -> Any:
    """The same JSON value with the keys of every object in order."""
    if isinstance(value, dict):
        return {key: sorted_keys(item) for key, item in sorted(value.items())}
    return [sorted_keys(item) for item in value] if isinstance(value, list) else value


def function_type(function: dict[str, Any]) -> str:
    """One function, with the interfaces that its parameters refer to."""
    schema = function.get("parameters") or {}
    scope = Scope()
    argument = scope.object_type(schema, "")
    lines = []
    if scope.whole:
        fields = ",\n".join(text for _, _, text in scope.fields(schema, INDENT))
        inside = f"\n{fields}\n" if fields else ""
        lines.append(f"interface parameters {{{inside}}}")
        argument = "parameters"
    for name, definition in list(scope.definitions.items()):
        lines += commented(definition.get("description"), "")
        lines.append(f"interface {name} {scope.type_of(definition, '')}")
    lines += commented(function.get("description"), "")
    lines.append(f"type {function.get('name', 'function')} = (_: {argument}) => any;")
    return "\n".join(lines)


class Scope:
    """What the schema of one function refers to: `definitions`, and the `whole` of itself."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.whole = False

    def type_of(self, schema: Any, indent: str) -> str:
        """The type of a value; ValueError for a schema without one."""
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self._referred(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join([self.type_of(one, indent) for one in schema["anyOf"]])
        if "enum" in schema:
            return _enumerated(schema)
        if not schema:
            return "any"
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(UNION[one] for one in kind)
        if kind == "object":
            return self.object_type(schema, indent)
        if kind == "array":
            return self._array_type(schema.get("items"), indent)
        if not isinstance(kind, str):
            raise ValueError(f"no type: {schema}")
        return "number" if kind == "integer" else kind

    def object_type(self, schema: dict[str, Any], indent: str) -> str:
        self.definitions |= schema.get("$defs") or {}
        others, inner = schema.get("additionalProperties"), indent + INDENT
        rest = []
        if others is not None:
            kind = "never" if others is False else self.type_of(others, inner)
            rest = [f"{inner}[k: string]: {kind}"]
        fields = [text for _, _, text in sorted(self.fields(schema, inner))] + rest
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"

    def fields(self, schema: dict[str, Any], indent: str) -> list[tuple[bool, str, str]]:
        """(optional, name, text) of every property, as they come."""
        required, found = schema.get("required", []), []
        for name, value in schema.get("properties", {}).items():
            optional = name not in required
            lines = _comments(value, indent)
            default = value.get("default") if isinstance(value, dict) else None
            if default is not None:
                plain = isinstance(default, int | float)
                shown = repr(default) if plain else json.dumps(default, ensure_ascii=False)
                lines.append(f"{indent}// Default: {shown}")
            mark = "?" if optional else ""
            lines.append(f"{indent}{name}{mark}: {self.type_of(value, indent)}")
            found.append((optional, name, "\n".join(lines)))
        return found

    def _array_type(self, items: Any, indent: str) -> str:
        if not items:
            return "Array<any>"
        inner = indent + INDENT
        lines = _comments(items, inner)
        if not lines:
            return f"Array<{self.type_of(items, indent)}>"
        return "\n".join(["Array<", *lines, inner + self.type_of(items, inner), f"{indent}>"])

    def _referred(self, reference: str) -> str:
        if reference == "#":
            self.whole = True
            return "parameters"
        name = reference.removeprefix("#/$defs/")
        if name == reference or name.split("/")[-1] not in self.definitions:
            raise ValueError(f"no definition: {reference}")
        return name.split("/")[-1]


def commented(text: str | None, indent: str) -> list[str]:
    """A description as lines of comment; an empty line stays empty."""
    return [f"{indent}// {line}" if line else "" for line in text.split("\n")] if text else []


def _comments(schema: Any, indent: str) -> list[str]:
    """Description and limits of a value."""
    if not isinstance(schema, dict):
        return []
    lines = commented(schema.get("description"), indent)
    kind = schema.get("type")
    if isinstance(kind, str) and not schema.keys() & {"$ref", "anyOf", "enum"}:
        limits = [f"{key}: {schema[key]}" for key in LIMITS.get(kind, ()) if key in schema]
        if limits:
            lines.append(f"{indent}// {', '.join(limits)}")
    return lines


def _enumerated(schema: dict[str, Any]) -> str:
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds or []
    named = [kind for kind in kinds if kind != "null"]
    if len(kinds) > 2 or len(named) > 1:
        raise ValueError(f"values of several types: {schema}")
    for value in schema["enum"]:
        if named and value is not None and not isinstance(value, VALUES.get(named[0], object)):
            raise ValueError(f"{value!r} is no {named[0]}")
    return " | ".join([f'"{one}"' if isinstance(one, str) else str(one) for one in schema["enum"]])
