"use strict";
// Requests an answer from the server and reads its events; holds the models of the server, and the chosen one.

const base = location.pathname.replace(/\/$/, "");
const key = find("key");
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

const headers = () => ({"content-type": "application/json", ...(key.value ? {authorization: "Bearer " + key.value} : {})});

const UNREACHABLE = "The server does not answer: it has ended, or the connection is broken.";

/** Throw the error of an aborted request unchanged, any other failure of the connection in words. */
function unreachable(error) { throw error.name === "AbortError" ? error : new Error(UNREACHABLE); }

/** Send a request with the key and return the response; throw an Error in words if none arrives. */
function request(path, options = {}) {
  if (/[^ -~]/.test(key.value)) return Promise.resolve(new Response(null, {status: 401}));  // no header can hold it
  return fetch(base + path, {...options, headers: headers()}).catch(unreachable);
}

/** Show the field of the key, and return why the server has refused a request with status 401. */
function keyProblem() {
  key.hidden = false;
  return key.value ? "The API key is wrong. Correct it at the top of the page." : "This server needs an API key. Enter it at the top of the page.";
}

/** Return a refusal of the server in words: it counts messages and their parts, a reader the pictures of a message. */
function inWords(refusal) {
  const part = /^messages\[\d+\](?:\.content)?(?:\[(\d+)\])?: (?:picture \d+: )?/.exec(refusal);
  if (!part) return refusal;
  const rest = refusal.slice(part[0].length);
  return part[0].includes("picture") && part[1] ? `Picture ${Number(part[1]) + 1} of this message: ${rest}` : rest;
}

/** Return why the server has refused a request, from its response. */
async function refusalOf(response) {
  if (response.status === 401) return keyProblem();
  const found = await response.json().catch(() => ({}));
  return found.error ? inWords(found.error.message) : `The server answers with status ${response.status}.`;
}

/** Return a message's content as parts: its pictures, then its text. */
function partsOf(content, pictures) {
  const text = content ? [{type: "text", text: content}] : [];
  return [...pictures.map(url => ({type: "image_url", image_url: {url}})), ...text];
}

/** Return the request's body for a conversation that ends with a question. */
function bodyOf({messages, settings}) {
  const system = settings.system ? [{role: "system", content: settings.system}] : [];
  const sent = messages.map(({role, content, pictures}) => ({role, content: pictures ? partsOf(content, pictures) : content}));
  const body = {messages: [...system, ...sent], stream: true, stream_options: {include_usage: true}, return_progress: true};
  if (served.length > 1) body.model = modelOf(settings).id;
  for (const name of NUMBERS) if (settings[name]) body[name] = Number(settings[name]);
  if (settings.thinking) body.chat_template_kwargs = {enable_thinking: settings.thinking === "on"};
  return body;
}

async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for (let reader = response.body.getReader(), piece; !(piece = await reader.read().catch(unreachable)).done;) {
    const lines = (rest + decoder.decode(piece.value, {stream: true})).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

/** Yield the events of an answer; throw an Error in words if the server refuses the request or the answer fails. */
async function* answerEvents(body, signal) {
  const loaded = watchLoad();
  const response = await request("/v1/chat/completions", {method: "POST", body: JSON.stringify(body), signal}).finally(loaded);
  if (!response.ok) throw new Error(await refusalOf(response));
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    yield event;
  }
}

/** Return what a finish reason means for the reader, "" for a complete answer. */
function finishText(reason, reasoning) {
  if (reason === "length") return reasoning ? "Cut during its thinking: the limit of tokens or the context is reached." : "Cut: the limit of tokens or the context is reached.";
  return reason === "tool_calls" ? "The answer ended with a tool call." : "";
}

/** Add a delta's tool calls to a message's, whose arguments arrive in pieces. */
function addCalls(message, deltas) {
  message.calls ??= [];
  for (const {index, function: {name, arguments: piece}} of deltas) {
    message.calls[index] ??= {name: "", arguments: ""};
    message.calls[index].name += name ?? "";
    message.calls[index].arguments += piece ?? "";
  }
}

// --- the model

let served = [];  // {id, max_model_len, input_modalities}, the server's default first

/** Show the models that the server lists; with several, a conversation keeps its choice in its settings. */
function showModels(models) {
  served = models;
  const choice = find("choice");
  choice.replaceChildren(...models.map(model => element("option", "", model.id)));
  choice.hidden = models.length < 2;
  find("model").hidden = models.length > 1;
}

/** Return the chosen model of a conversation, the default one if it has none or an unknown one. */
const modelOf = settings => served.find(model => model.id === settings.model) ?? served[0];

/** Show progress while the model of a request is loaded; return a function that ends this. */
function watchLoad() {
  if (served.length < 2) return () => {};
  const timer = setInterval(async () => {
    const health = await request("/health").then(response => response.json()).catch(() => ({}));
    if (!ended && health.loading) find("notice").textContent = loadText(health.loading);
  }, 500);
  let ended = false;
  return () => { ended = true; clearInterval(timer); find("notice").textContent = ""; };
}

const loadText = ({model, stage, done, total}) => `Loading ${model ?? "a model"}: ${stage}` + (total ? `, ${done.toLocaleString()} of ${total.toLocaleString()}` : "");
