/** Reads the event stream of /v1/tts/stream/with-timestamp. */

/** Yields { bytes, words } of each event. `body` is a ReadableStream of bytes; `text` is the text of the request.
 *
 * A word has { first, last }, its place in `text`, and { start, end } in seconds of the request's audio.
 */
export async function* timedAudio(body, text) {
  const place = placesIn(text);
  for await (const event of events(body)) {
    const { segments = [] } = event.alignment ?? {};
    const from = event.chunk_audio_offset_sec;
    const words = segments.map(({ first, last, start, end }) => ({
      first: place(first),
      last: place(last),
      start: from + start,
      end: from + end,
    }));
    yield { bytes: Uint8Array.from(atob(event.audio_base64), (letter) => letter.charCodeAt(0)), words };
  }
}

/** Yields the parsed data of server-sent events; every event is one line of JSON. */
export async function* events(body) {
  const [stream, decoder] = [body.getReader(), new TextDecoder()];
  let text = "";
  for (;;) {
    const { done, value } = await stream.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const whole = text.split("\n\n");
    text = whole.pop();
    for (const event of whole) yield JSON.parse(event.slice("data: ".length));
  }
}

/** Returns a function from the server's positions, in code points, to positions in a string, in UTF-16 units. */
function placesIn(text) {
  const places = [];
  let at = 0;
  for (const letter of text) {
    places.push(at);
    at += letter.length;
  }
  return (position) => places[position] ?? text.length;
}
