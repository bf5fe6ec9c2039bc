"use strict";
// Shows Markdown safely: HTML in it is text, everything is sanitized, and nothing is loaded from elsewhere.

const escaped = text => text.replace(/[&<>"']/g, mark => `&#${mark.charCodeAt(0)};`);

const renderer = {
  html: token => escaped(token.text),
  checkbox: token => token.checked ? "☑ " : "☐ ",
  image: token => `${escaped(token.text)} (${escaped(token.href)})`,
};
const tokenizer = {def: () => undefined};  // a definition of a link is shown as text
const parser = new marked.Marked({gfm: true, breaks: true, renderer, tokenizer});
const SAFE = {
  ALLOWED_TAGS: ["p", "br", "strong", "em", "del", "code", "pre", "a", "ul", "ol", "li", "h1", "h2", "h3", "h4", "h5",
    "h6", "blockquote", "hr", "table", "thead", "tbody", "tr", "th", "td"],
  ALLOWED_ATTR: ["href", "class", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
};
DOMPurify.addHook("afterSanitizeAttributes", node => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
});

/** Return a fragment of safe elements for the tokens of a block. */
function elementsOf(token) {
  const tokens = [token];
  tokens.links = {};
  const html = parser.parser(tokens);
  const fragment = DOMPurify.sanitize(html, {...SAFE, RETURN_DOM_FRAGMENT: true});
  for (const code of fragment.querySelectorAll("pre")) code.append(copyButton(() => code.querySelector("code").textContent, "Copy code"));
  for (const table of fragment.querySelectorAll("table, pre")) table.tabIndex = 0;  // scrollable by keyboard
  return fragment;
}

function copyButton(textOf, label) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = label;
  button.addEventListener("click", async () => {
    button.textContent = await copied(textOf()) ? "Copied" : "Copying failed";
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

/** Copy a text, also where the page is not served over HTTPS; return whether it worked. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const worked = document.execCommand("copy");
    area.remove();
    return worked;
  }
}

/** Shows a growing Markdown text in an element; blocks that did not change keep their elements. */
class MarkdownView {
  constructor(box) {
    this.box = box;
    this.blocks = [];  // {raw, nodes}
    this.text = "";
    this.timer = null;
    this.pause = 0;
  }

  /** Append text; it is shown at the next opportunity, at most a fifth of the time is spent on it. */
  add(piece) {
    this.text += piece;
    this.timer ??= setTimeout(() => this.draw(), this.pause);
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    const began = performance.now();
    const tokens = parser.lexer(this.text).filter(token => token.type !== "space");
    let same = 0;
    while (same < tokens.length && same < this.blocks.length && tokens[same].raw === this.blocks[same].raw) same += 1;
    for (const block of this.blocks.splice(same)) for (const node of block.nodes) node.remove();
    for (const token of tokens.slice(same)) {
      const fragment = elementsOf(token), nodes = [...fragment.childNodes];
      this.box.append(fragment);
      this.blocks.push({raw: token.raw, nodes});
    }
    this.pause = Math.min(1000, Math.max(40, 4 * (performance.now() - began)));
  }
}
