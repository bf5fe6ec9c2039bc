"use strict";
// The page: the current conversation, sending, stopping, editing, settings, and the list of conversations.

const text = find("text");
const DRAFT = "mlx-mtp-draft", CURRENT = "mlx-mtp-current", CUT = "mlx-mtp-cut";
let current = newConversation(), messages = current.messages;
let stopping = null, drafted = 0, right = 0, positions = 0;

const remembered = {
  get(name) { try { return localStorage.getItem(name); } catch { return null; } },
  set(name, value) { try { localStorage.setItem(name, value); } catch { /* kept in the database, or not at all */ } },
};

// --- the current conversation

async function save() {
  current.time = Date.now();
  current.title ||= titleOf(messages);
  if (messages.length) await keep(current);
  remembered.set(CURRENT, current.id);
  await list();
}

async function list() {
  showList(await allConversations(), current.id, {open, rename, exported, remove});
  find("storage").textContent = stored.problem;
  find("storage").hidden = !stored.problem;
}

function open(conversation) {
  stopping?.abort();
  current = conversation;
  messages = current.messages;
  remembered.set(CURRENT, current.id);
  closeSide();
  draw();
  void list();
}

/** Show all messages of the current conversation. */
function draw() {
  talk.replaceChildren();
  drafted = right = 0;
  find("acceptance").hidden = true;
  find("paused").textContent = find("context").textContent = find("notice").textContent = "";
  for (const message of messages) showMessage(message, actionsOf(message));
  talk.scrollTop = talk.scrollHeight;
  fillSettings();
  showChoice();
  text.focus();
}

function actionsOf(message) {
  const copy = copyButton(() => message.content, "Copy");
  if (message.role === "user") return [button("Edit", () => edit(message)), copy];
  return [copy, button("Regenerate", () => regenerate(message))];
}

// --- sending and answering

function count(usage) {
  const made = usage.mlx_mtp;
  drafted += made.draft_n;
  right += made.draft_n_accepted;
  find("acceptance").hidden = !drafted;
  find("meter").value = drafted ? right / drafted : 0;
  find("share").textContent = drafted ? Math.round(100 * right / drafted) + "%" : "";
  find("paused").textContent = made.paused;
  const used = usage.prompt_tokens + usage.completion_tokens;
  find("context").textContent = positions ? `context ${used.toLocaleString()} of ${positions.toLocaleString()}` : "";
  return `${usage.completion_tokens} tokens, ${made.tokens_per_second}/s, ${made.tokens_per_cycle} a cycle, ` +
    `${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens reused` + (made.paused && `; ${made.paused}`);
}

/** Send a question with pictures; a refused one returns to the box. Returns whether there is an answer. */
async function ask(question, shown = []) {
  const asked = current, began = {role: "user", content: question, ...(shown.length && {pictures: shown})}, control = busy();
  asked.messages.push(began);
  const view = showMessage(began, actionsOf(began));
  talk.scrollTop = talk.scrollHeight;
  await save();
  if (await answer(asked, control)) return true;
  asked.messages.splice(asked.messages.indexOf(began), 1);
  view.box.remove();
  if (!text.value) setText(question);
  if (!pictures.length) setPictures(shown);
  talk.scrollTop = talk.scrollHeight;  // the pictures above the box now cover the error
  await (asked.messages.length ? keep(asked) : forget(asked.id));
  await list();
  return false;
}

/** Generate the answer to the last message of a conversation; return false if there is none. control: aborts it. */
async function answer(asked, control) {
  const message = {role: "assistant", content: ""}, view = new MessageView("assistant"), body = bodyOf(asked);
  let failed = "", seen = false, ends = "";
  try {
    for await (const event of answerEvents(body, control.signal)) {
      if (event.prompt_progress) progress(event.prompt_progress);
      for (const {delta, finish_reason} of event.choices ?? []) {
        seen = receive(message, view, delta) || seen;
        if (finish_reason) ends = finish_reason;
      }
      if (seen) find("notice").textContent = "";
      if (event.usage) message.figures = count(event.usage);
      partial(asked, message, seen);
    }
    message.finish = finishText(ends, !message.content && message.reasoning);
  } catch (error) {
    if (error.name === "AbortError") message.finish = "(stopped)";
    else failed = String(error.message);
  }
  find("notice").textContent = "";
  if (seen) asked.messages.push(message);
  if (stopping === control) idle();  // whoever sees the figures can send
  remembered.set(CUT, "");
  for (const call of message.calls ?? []) view.call(call);
  if (failed) view.add("error", failed);
  for (const line of [message.finish, message.figures]) if (line) view.add("figures", line);
  if (failed) message.finish = `(cut: ${failed})`;  // replaces the error when the conversation is opened again
  view.end(seen ? actionsOf(message) : []);
  if (!seen) view.box.classList.add("unkept");  // the other boxes are those of the messages
  if (seen) await keep(asked);
  return seen;
}

/** Add a delta to a message and show it; return whether it had anything. */
function receive(message, view, delta) {
  if (delta.reasoning_content) {
    message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
    view.add("thought", delta.reasoning_content);
  }
  if (delta.content) {
    message.content += delta.content;
    view.add("said", delta.content);
  }
  if (delta.tool_calls) addCalls(message, delta.tool_calls);
  return Boolean(delta.reasoning_content || delta.content || delta.tool_calls);
}

function progress({total, processed}) {
  find("notice").textContent = processed < total ? `Reading the prompt: ${processed.toLocaleString()} of ${total.toLocaleString()} tokens` : "";
}

/** Show that an answer is awaited, and remove what is shown of failed ones; return what aborts it. */
function busy() {
  for (const box of talk.querySelectorAll(".unkept")) box.remove();
  stopping = new AbortController();
  find("send").hidden = true;
  find("stop").hidden = false;
  talk.setAttribute("aria-busy", "true");
  return stopping;
}

function idle() {
  stopping = null;
  find("send").hidden = false;
  find("stop").hidden = true;
  talk.setAttribute("aria-busy", "false");
  text.focus();
}

/** Remember an unfinished answer, which a reload would lose. */
let partialAt = 0;
function partial(asked, message, seen) {
  if (!seen || Date.now() - partialAt < 300) return;
  partialAt = Date.now();
  remembered.set(CUT, JSON.stringify({id: asked.id, message: {...message, finish: "(cut by a reload)"}}));
}

/** Replace a question and everything behind it. */
function edit(message) {
  if (!find("stop").hidden) return;
  const at = messages.indexOf(message), box = talk.querySelectorAll("article:not(.unkept)")[at], area = element("textarea", "edit");
  area.value = message.content;
  area.rows = Math.min(12, message.content.split("\n").length + 1);
  area.setAttribute("aria-label", "Edit the message");
  const resend = async () => {
    const changed = area.value.trim();
    if (!changed && !message.pictures) return;
    const edited = current, removed = messages.splice(at);
    draw();
    if (await ask(changed, message.pictures)) return;
    edited.messages.push(...removed);  // nothing replaces them
    await keep(edited);
    if (current === edited) redraw();
  };
  area.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); resend(); }
    if (event.key === "Escape") draw();
  });
  const row = element("div", "actions");
  row.append(button("Send", resend), button("Cancel", draw));
  box.replaceChildren(...box.querySelectorAll(".shown-pictures"), area, row);
  area.focus();
}

async function regenerate(message) {
  if (!find("stop").hidden) return;
  const removed = messages.splice(messages.indexOf(message));
  draw();
  if (await answer(current, busy())) return;
  messages.push(...removed);
  redraw();
}

/** Show all messages again, and below them the error that is shown last. */
function redraw() {
  const trouble = talk.lastElementChild;
  draw();
  talk.append(trouble);
}

// --- the list of conversations

function rename(conversation) {
  const title = prompt("Name of the conversation", conversation.title)?.trim();
  if (!title) return;
  conversation.title = title;
  if (conversation.id === current.id) current.title = title;
  void keep(conversation).then(list);
}

const exported = conversation => download(`${conversation.title.replace(/[^\w-]+/g, "-").slice(0, 40) || "conversation"}.json`, conversation);

async function remove(conversation) {
  if (!confirm(`Delete “${conversation.title}”?`)) return;
  await forget(conversation.id);
  if (conversation.id === current.id) open(newConversation());
  else await list();
}

async function importFile(file) {
  try {
    const found = parsedConversations(await file.text());
    for (const each of found) {
      each.title ||= titleOf(each.messages);
      await keep(each);
    }
    open(found.at(-1));
  } catch (error) {
    find("notice").textContent = `${file.name} was not imported: ${error.message}`;
  }
}

// --- settings

const settingsForm = find("settings").querySelector("form");
const fields = () => [...settingsForm.elements].filter(field => field.name);

function fillSettings() {
  for (const field of fields()) field.value = current.settings[field.name] ?? "";
}

find("open-settings").addEventListener("click", () => { fillSettings(); find("settings").showModal(); });
find("settings").addEventListener("close", () => {
  for (const field of fields()) current.settings[field.name] = field.validity.valid ? field.value.trim() : "";
  void save();
});

// --- events

function setText(value) {
  text.value = value;
  remembered.set(DRAFT, value);
}

function closeSide() {
  find("side").classList.remove("shown");
  find("open-side").setAttribute("aria-expanded", "false");
}

find("form").addEventListener("submit", event => {
  event.preventDefault();
  const question = text.value.trim();
  if (!(question || pictures.length) || !find("stop").hidden) return;
  setText("");
  void ask(question, takePictures());
});
text.addEventListener("input", () => remembered.set(DRAFT, text.value));
text.addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); find("form").requestSubmit(); }
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && !find("settings").open) { stopping?.abort(); closeSide(); }
});
find("stop").addEventListener("click", () => stopping?.abort());
find("clear").addEventListener("click", () => open({...newConversation(), settings: {...current.settings}}));
find("import").addEventListener("click", () => find("file").click());
find("file").addEventListener("change", event => { if (event.target.files[0]) void importFile(event.target.files[0]); event.target.value = ""; });
find("export-all").addEventListener("click", async () => download("conversations.json", {conversations: await allConversations()}));
find("open-side").addEventListener("click", () => {
  find("side").classList.add("shown");
  find("open-side").setAttribute("aria-expanded", "true");
  find("clear").focus();
});
find("close-side").addEventListener("click", () => { closeSide(); find("open-side").focus(); });

async function greet() {
  const response = await request("/v1/models").catch(() => null);
  if (response?.ok) {
    showModels((await response.json()).data);
    showChoice();
    find("notice").textContent = "";
    return;
  }
  find("notice").textContent = response ? await refusalOf(response) : UNREACHABLE;
  if (!response || response.status === 503) setTimeout(greet, 1000);
}
key.addEventListener("change", greet);

/** Show the model of the current conversation. */
function showChoice() {
  const model = modelOf(current.settings);
  find("model").textContent = find("choice").value = model?.id ?? "mlx-mtp";
  positions = model?.max_model_len ?? 0;
  sees = model?.input_modalities?.includes("image") ?? true;
  find("attach").hidden = !sees;
}
find("choice").addEventListener("change", () => {
  current.settings.model = find("choice").value;
  showChoice();
  void save();
});

/** Open the conversation that was open before a reload, with the part of an answer that the reload cut. */
async function start() {
  await openStore();
  const found = (await allConversations()).find(each => each.id === remembered.get(CURRENT));
  const cut = JSON.parse(remembered.get(CUT) || "null");
  if (found && cut?.id === found.id && found.messages.at(-1)?.role === "user") {
    found.messages.push(cut.message);
    await keep(found);
  }
  remembered.set(CUT, "");
  if (found) open(found);
  else await list();
  if (!text.value) text.value = remembered.get(DRAFT) ?? "";
  await greet();
}
void start();
