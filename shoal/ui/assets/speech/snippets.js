/** Code that generates the same speech: requests of /v1/tts as curl, Python and JavaScript. */

export const LANGUAGES = { curl: "curl", python: "Python", javascript: "JavaScript" };

const KEY_VARIABLE = "SHOAL_KEY";

/** Joins lines that follow each other with one voice: the page splits long texts, a program need not. */
export function requestsOf(lines) {
  const found = [];
  for (const { text, voice } of lines) {
    const last = found.at(-1);
    if (last && last.voice === voice) last.text += ` ${text}`;
    else found.push({ text, voice });
  }
  return found;
}

/** `requests` as of `requestsOf`; `options` are the other fields of /v1/tts. The key itself is never written. */
export function snippet(language, { requests, options }, { url, needsKey }) {
  const bodies = requests.map(({ text, voice }) => ({
    text,
    ...(voice === null ? {} : { reference_id: voice }),
    ...options,
    format: "wav",
  }));
  const write = { curl, python, javascript }[language];
  return write(bodies, new URL("v1/tts", url).href, needsKey);
}

const nameOf = (at, all) => (all === 1 ? "speech.wav" : `speech-${at + 1}.wav`);
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curl(bodies, url, needsKey) {
  const key = needsKey ? ` \\\n  -H "Authorization: Bearer $${KEY_VARIABLE}"` : "";
  const command = (body, at) =>
    `curl ${quoted(url)} --fail -o ${nameOf(at, bodies.length)}${key} \\\n` +
    `  -H 'Content-Type: application/json' \\\n  -d ${quoted(JSON.stringify(body))}`;
  return bodies.map(command).join("\n\n");
}

function python(bodies, url, needsKey) {
  const key = needsKey ? `, headers={"Authorization": f"Bearer {os.environ['${KEY_VARIABLE}']}"}` : "";
  return [
    ...(needsKey ? ["import os", ""] : []),
    "import requests",
    "",
    // JSON without true, false and null is a Python literal.
    `bodies = ${JSON.stringify(bodies, null, 4)}`,
    "for number, body in enumerate(bodies, 1):",
    `    answer = requests.post(${JSON.stringify(url)}, json=body${key}, timeout=600)`,
    "    answer.raise_for_status()",
    `    with open(f"speech-{number}.wav", "wb") as file:`,
    "        file.write(answer.content)",
  ].join("\n");
}

function javascript(bodies, url, needsKey) {
  const key = needsKey ? `, Authorization: \`Bearer \${process.env.${KEY_VARIABLE}}\`` : "";
  return [
    'import { writeFile } from "node:fs/promises";',
    "",
    `const bodies = ${JSON.stringify(bodies, null, 2)};`,
    "for (const [at, body] of bodies.entries()) {",
    `  const answer = await fetch(${JSON.stringify(url)}, {`,
    '    method: "POST",',
    `    headers: { "Content-Type": "application/json"${key} },`,
    "    body: JSON.stringify(body),",
    "  });",
    "  if (!answer.ok) throw new Error(await answer.text());",
    "  await writeFile(`speech-${at + 1}.wav`, Buffer.from(await answer.arrayBuffer()));",
    "}",
  ].join("\n");
}
