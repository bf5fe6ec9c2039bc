"use strict";
// Keeps conversations in the browser (IndexedDB): {id, title, time, settings, messages}.
// A message is {role, content}; a user's may also have pictures, an assistant's reasoning, calls, figures and finish.

const KEPT = "mlx-mtp";
const stored = {database: null, problem: ""};

function openDatabase() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(KEPT, 1);
    request.onupgradeneeded = () => request.result.createObjectStore("conversations", {keyPath: "id"});
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function inStore(mode, work) {
  return new Promise((resolve, reject) => {
    const transaction = stored.database.transaction("conversations", mode);
    const request = work(transaction.objectStore("conversations"));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

/** Open the store; without one conversations last until the page is closed, and `stored.problem` is the reason. */
async function openStore() {
  try {
    stored.database = await openDatabase();
  } catch (error) {
    stored.problem = `Conversations are not kept: ${error?.message ?? "this browser stores nothing"}`;
  }
}

const unsaved = new Map();  // conversations of a page without a store

async function allConversations() {
  const found = stored.database ? await inStore("readonly", store => store.getAll()) : [...unsaved.values()];
  return found.sort((a, b) => b.time - a.time);
}

async function keep(conversation) {
  if (!stored.database) return void unsaved.set(conversation.id, conversation);
  try {
    await inStore("readwrite", store => store.put(conversation));
  } catch (error) {
    stored.problem = `The conversation was not saved: ${error?.message ?? error}`;
  }
}

async function forget(id) {
  unsaved.delete(id);
  if (stored.database) await inStore("readwrite", store => store.delete(id));
}

function newConversation() {
  return {id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", time: Date.now(), settings: {}, messages: []};
}

/** Return the conversations in an exported file or in a file of `mlx-mtp chat`'s /save; throw an Error for others. */
function parsedConversations(text) {
  const found = JSON.parse(text);
  const list = Array.isArray(found?.conversations) ? found.conversations : [found];
  return list.map(each => {
    const messages = Array.isArray(each) ? each : each?.messages;
    if (!Array.isArray(messages) || !messages.every(isMessage)) throw new Error("no conversation: messages with role and content are missing");
    const system = messages[0]?.role === "system" ? {system: messages[0].content} : {};
    const settings = Object.fromEntries(Object.entries(each.settings ?? {}).filter(([, value]) => typeof value === "string"));
    const kept = messages.filter(message => message.role !== "system");
    return {...newConversation(), title: String(each.title ?? ""), settings: {...system, ...settings}, messages: kept};
  });
}

const isPicture = url => typeof url === "string" && /^data:image\/(png|jpeg|webp|gif);base64,/.test(url);

/** Return the title of a conversation without one: the start of its first message. */
function titleOf([first]) {
  return first?.content.trim().split("\n")[0].slice(0, 60) || (first?.pictures ? "Picture" : "");
}

function isMessage(message) {
  return ["system", "user", "assistant"].includes(message?.role) && typeof message.content === "string" &&
    ["reasoning", "figures", "finish"].every(name => ["undefined", "string"].includes(typeof message[name])) &&
    (message.pictures === undefined || Array.isArray(message.pictures) && message.pictures.every(isPicture)) &&
    (message.calls === undefined || Array.isArray(message.calls) && message.calls.every(call => typeof call?.name === "string" && typeof call.arguments === "string"));
}

function download(name, value) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(value, null, 1)], {type: "application/json"}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
