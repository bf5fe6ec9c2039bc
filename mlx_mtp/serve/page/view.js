"use strict";
// Creates the elements of messages and of the list of conversations.

const find = id => document.getElementById(id);
const talk = find("talk");

function element(tag, className = "", content = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = content;
  return made;
}

function button(label, action, className = "") {
  const made = element("button", className, label);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

/** Scroll to the end unless the reader has scrolled up. */
function follow() {
  if (talk.scrollHeight - talk.scrollTop - talk.clientHeight < 120) talk.scrollTop = talk.scrollHeight;
}

/** Return a picture's element. number: its index in the message. */
function image(url, number) {
  const made = element("img");
  made.src = url;
  made.alt = `Picture ${number + 1}`;
  return made;
}

/** The article of a message; `add` appends what arrives. */
class MessageView {
  constructor(role) {
    this.box = element("article", role);
    this.box.setAttribute("aria-label", role === "user" ? "You" : "Answer");
    talk.append(this.box);
    this.said = this.thought = this.markdown = null;
  }

  /** Append a piece of the kind "said", "thought", "figures" or "error". */
  add(kind, piece) {
    if (kind === "said") this.speak(piece);
    else if (kind === "thought") this.think(piece);
    else this.box.append(element("div", kind, piece));
    follow();
  }

  speak(piece) {
    if (!this.said) {
      this.said = element("div", "said");
      this.box.append(this.said);
      if (this.thought) this.thought.open = false;  // thinking has ended
      this.markdown = this.box.className === "assistant" ? new MarkdownView(this.said) : null;
    }
    if (this.markdown) this.markdown.add(piece);
    else this.said.textContent += piece;
  }

  think(piece) {
    if (!this.thought) {
      this.thought = element("details", "thought");
      this.thought.append(element("summary", "", "Thinking"), element("div"));
      this.thought.open = true;
      this.box.append(this.thought);
    }
    this.thought.lastElementChild.textContent += piece;
  }

  show(urls) {
    const row = element("div", "shown-pictures");
    row.append(...urls.map(image));
    for (const each of row.children) each.addEventListener("load", () => { talk.scrollTop = talk.scrollHeight; });
    this.box.append(row);
  }

  call({name, arguments: given}) {
    const box = element("div", "call");
    box.append(element("b", "", `Tool call: ${name}`), element("pre", "", given));
    this.box.append(box);
  }

  /** Draw what is not drawn yet, and append the buttons. */
  end(actions) {
    this.markdown?.draw();
    const row = element("div", "actions");
    row.append(...actions);
    this.box.append(row);
    follow();
  }
}

/** Show a stored message with its buttons. */
function showMessage(message, actions) {
  const view = new MessageView(message.role);
  if (message.reasoning) {
    view.add("thought", message.reasoning);
    view.thought.open = false;
  }
  if (message.pictures) view.show(message.pictures);
  if (message.content) view.add("said", message.content);
  for (const call of message.calls ?? []) view.call(call);
  if (message.finish) view.add("figures", message.finish);
  if (message.figures) view.add("figures", message.figures);
  view.end(actions);
  return view;
}

/** Fill the list of conversations. actions: open, rename, exported and remove, each of one conversation. */
function showList(conversations, current, actions) {
  const rows = conversations.map(conversation => {
    const row = element("li"), menu = element("div", "menu"), more = element("details"), dots = element("summary", "", "⋯");
    const open = button(conversation.title || "New chat", () => actions.open(conversation), "open");
    if (conversation.id === current) open.setAttribute("aria-current", "true");
    dots.setAttribute("aria-label", `More for ${conversation.title || "New chat"}`);
    for (const [label, act] of [["Rename", actions.rename], ["Export", actions.exported], ["Delete", actions.remove]]) {
      menu.append(button(label, () => { more.open = false; act(conversation); }));
    }
    more.append(dots, menu);
    row.append(open, more);
    return row;
  });
  find("list").replaceChildren(...rows);
}
