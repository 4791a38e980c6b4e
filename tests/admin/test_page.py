"""The page: self-contained, under a strict policy, and reading only fields that exist."""

import base64
import dataclasses
import hashlib
import re
from html.parser import HTMLParser
from importlib.resources import files

import msgspec
import pytest
from aiohttp.test_utils import TestClient
from aiohttp.web import Application, Request

from envoy_tokenpools.admin.app import MAX_REQUEST_ID_CHARS
from envoy_tokenpools.admin.state import state_document
from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.observer import Ended
from tests.support.reports import QWEN, SHED

Client = TestClient[Request, Application]

PAGE = files("envoy_tokenpools.admin").joinpath("page.html").read_text("utf-8")


class Links(HTMLParser):
    """Collects what a page refers to, and attributes that a strict policy would block."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.blocked: list[str] = []
        self.texts: dict[str, str] = {}
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note links, inline styles and inline handlers."""
        self._inside = tag
        for name, target in attrs:
            if name in ("href", "src", "action"):
                self.targets.append(target or "")
            if name == "style" or name.startswith("on"):
                self.blocked.append(name)

    def handle_data(self, data: str) -> None:
        """Note the texts of styles and scripts."""
        if self._inside in ("style", "script"):
            self.texts[self._inside] = self.texts.get(self._inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        """Leave the element."""
        if tag == self._inside:
            self._inside = ""


@pytest.fixture
def links() -> Links:
    """The page's, parsed."""
    parsed = Links()
    parsed.feed(PAGE)
    return parsed


def test_the_page_refers_to_nothing_outside_this_server(links: Links) -> None:
    """No font, script, style or image comes from elsewhere, and none is named in its texts."""
    assert [link for link in links.targets if not link.startswith(("/", "data:,"))] == []
    assert [link for link in links.targets if link.startswith("//")] == []
    assert "://" not in PAGE
    assert "@import" not in PAGE
    assert "url(" not in PAGE


async def test_the_policy_admits_exactly_the_inline_style_and_script(
    client: Client, links: Links
) -> None:
    """Their hashes are in the header; nothing in the page needs more than that."""
    answer = await client.get("/")
    policy = dict(
        directive.strip().split(" ", 1)
        for directive in answer.headers["content-security-policy"].split(";")
    )
    assert (answer.content_type, answer.charset) == ("text/html", "utf-8")
    assert await answer.text() == PAGE
    for kind in ("style", "script"):
        digest = hashlib.sha256(links.texts[kind].encode()).digest()
        assert policy[f"{kind}-src"] == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert links.blocked == []


def test_names_are_set_as_text_and_never_as_markup() -> None:
    """No way of the DOM that parses a string as HTML or code is used."""
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc"
    assert re.findall(forbidden, PAGE) == []


def test_the_page_knows_every_service_class(links: Links) -> None:
    """Each has a colour in both schemes and a place in the bars."""
    for service_class in ServiceClass:
        assert links.texts["style"].count(f"--{service_class.value}: #") == 2
        assert f'"{service_class.value}"' in links.texts["script"]


def test_every_field_that_the_page_reads_is_in_the_state(links: Links) -> None:
    """A renamed field would leave the page silently empty."""
    document = msgspec.json.encode(state_document("1", [QWEN])).decode()
    fields = set(re.findall(r'"(\w+)":', document))
    views = r"\b(?:now|one|used|capacity|usable|state|pool|thing|entitlement)\.(\w+)"
    reads = set(re.findall(views, links.texts["script"])) - {"className"}
    assert {"in_flight", "tokens_reserved", "prompt_ratios", "pools", "debt"} <= reads
    assert reads <= fields


def test_every_field_that_the_page_reads_is_in_an_explanation(links: Links) -> None:
    """A renamed field would make it tell nonsense."""
    fields = set(re.findall(r'"(\w+)":', msgspec.json.encode(SHED).decode()))
    reads = set(re.findall(r"\bsaid\.(\w+)", links.texts["script"]))
    assert {"outcome", "rule", "priority", "shortage", "ended", "error"} <= reads
    assert reads - {"error"} <= fields
    assert {field.name for field in dataclasses.fields(Ended)} >= set(
        re.findall(r"\bsaid\.ended\.(\w+)", links.texts["script"])
    )


def test_whoever_asks_for_an_explanation_can_type_no_longer_id_than_is_remembered() -> None:
    """The field is labelled, and bounded as the server is."""
    assert f'maxlength="{MAX_REQUEST_ID_CHARS}"' in PAGE
    assert '<label for="request-id">' in PAGE
    assert "encodeURIComponent(id)" in PAGE


def test_the_page_can_be_read_without_colours_or_sight(links: Links) -> None:
    """It has a language, a title, labelled meters, table headings with scopes, and says when scripts are off."""
    assert '<html lang="en">' in PAGE
    assert "<title>Token pools</title>" in PAGE
    assert 'role="status"' in PAGE
    assert "<noscript>" in PAGE
    for part in ('"meter"', '"aria-valuetext"', 'scope = "col"', 'scope = "row"', '"caption"'):
        assert part in links.texts["script"]
    assert "prefers-color-scheme: dark" in links.texts["style"]
    assert "prefers-reduced-motion" in links.texts["style"]
