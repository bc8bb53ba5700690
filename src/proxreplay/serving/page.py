"""The page of a server: one self-contained file, which asks the server for its numbers."""

import base64
import functools
import hashlib
from importlib.resources import files
from typing import Any


def _source(name: str) -> str:
    return files("proxreplay.serving").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


STYLE, SCRIPT = _source("page.css"), _source("page.js")
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hash(SCRIPT)}; style-src {_hash(STYLE)}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("proxreplay.serving", "."), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template(template).render(style=STYLE, **values)


@functools.cache
def page() -> str:
    """The page; it holds no data."""
    return _render("page.html.j2", script=SCRIPT)


def docs(schema: dict[str, Any]) -> str:
    """The paths of an OpenAPI schema as a page."""
    rows = []
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            content = about.get("requestBody", {}).get("content", {})
            fields = content.get("application/json", {}).get("schema", {}).get("properties", {})
            row = {"method": method.upper(), "path": path, "about": about.get("summary", "")}
            rows.append({**row, "fields": fields, "kinds": list(content)})
    return _render("docs.html.j2", rows=rows, version=schema["info"]["version"])
