"use strict";
// The pictures of the next message: paste, drop or choose them; they are kept as data: URLs, in messages, too.

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST_BYTES = 20e6, MOST_PICTURES = 20;
const tray = find("tray");
let pictures = [], sees = true;  // sees: the model reads pictures

/** Return the data: URL of a file; "" if it cannot be read or is no picture that the browser decodes. */
async function readFile(file) {
  const url = await new Promise(resolve => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => resolve("");
    reader.readAsDataURL(file);
  });
  const probe = new Image();
  probe.src = url;
  return probe.decode().then(() => url, () => "");
}

/** Return why a file is not added, "" if it can be. */
function refusal(file) {
  if (!sees) return "this model reads text only";
  if (!KINDS.includes(file.type)) return "allowed are PNG, JPEG, WEBP and GIF";
  if (file.size > MOST_BYTES) return "allowed are 20 MB";
  return pictures.length < MOST_PICTURES ? "" : `a message has at most ${MOST_PICTURES} pictures`;
}

async function addFiles(files) {
  const refused = new Map();  // the names of files by reason
  for (const file of files) {
    let why = refusal(file);
    const url = why ? "" : await readFile(file);
    if (url) pictures.push(url);
    else why ||= "the file is damaged";
    if (why) refused.set(why, [...refused.get(why) ?? [], file.name || "The picture"]);
  }
  const lines = [...refused].map(([why, names]) => `${names.join(", ")} ${names.length > 1 ? "were" : "was"} not added: ${why}.`);
  find("notice").textContent = lines.join("\n");
  setPictures(pictures);
}

/** Replace the pictures of the next message and show them above the box. */
function setPictures(urls) {
  pictures = [...urls];
  tray.replaceChildren(...pictures.map((url, i) => {
    const box = element("div", "thumbnail");
    const remove = button("✕", () => setPictures(pictures.filter((_, j) => j !== i)));
    remove.setAttribute("aria-label", `Remove picture ${i + 1}`);
    box.append(image(url, i), remove);
    return box;
  }));
  tray.hidden = !pictures.length;
}

/** Return the pictures of the next message, which then has none. */
function takePictures() {
  const taken = pictures;
  setPictures([]);
  return taken;
}

const carriesFiles = event => [...event.dataTransfer?.types ?? []].includes("Files");

document.addEventListener("paste", event => {
  const files = [...event.clipboardData?.files ?? []];
  if (!files.length || event.clipboardData.getData("text/plain")) return;  // a table's cells are also a picture
  event.preventDefault();
  void addFiles(files);
});
for (const kind of ["dragenter", "dragover"]) document.addEventListener(kind, event => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", event => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
document.addEventListener("drop", event => {
  document.body.classList.remove("dropping");
  if (!carriesFiles(event)) return;
  event.preventDefault();
  void addFiles([...event.dataTransfer.files]);
});
find("attach").addEventListener("click", () => find("picture-files").click());
find("picture-files").addEventListener("change", event => { void addFiles([...event.target.files]); event.target.value = ""; });
