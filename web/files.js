// Files that a node left on the server for the page.
import { api } from "../../scripts/api.js";

export const fileUrl = (file) => api.apiURL(`/view?${new URLSearchParams(file)}`);

async function fetched(file) {
  const answer = await fetch(fileUrl(file));
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  return answer;
}

export async function fetchImage(file) {
  return createImageBitmap(await (await fetched(file)).blob());
}

/** What was recorded of a run: picks with their tokens, error maps with their bytes. */
export async function fetchRecord(file) {
  const data = await (await fetched(file)).json();
  for (const pick of data.picks) {
    pick.kept = pick.kept.map((packed) => new Int32Array(bytesOf(packed).buffer));
    pick.assignment = pick.assignment.map((packed) => new Int32Array(bytesOf(packed).buffer));
  }
  for (const found of (data.errors ??= [])) found.error = found.error.map(bytesOf);
  return data;
}

const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
