/** Waveform animation: a school of fish that lines up into a waveform when a track is loaded.
 *
 * Each fish is one bar. At rest the school swims in a loop; with a track each fish goes to its place, turns upright and
 * scales with the loudness of its segment. The coral leader marks the playback position.
 */

const SPACE = 7; // pixels per fish
const FISH = { length: 15, width: 4.8 };
const BAR = { min: 3, width: 3.2, share: 0.84 };
const LOOP_SECONDS = 44;

/** Creates fish with fixed pseudo-random positions in the school. */
export function schoolOf(size) {
  const random = seeded(7);
  return Array.from({ length: size }, () => ({
    across: random() + random() - 1,
    along: random() + random() - 1,
    pace: 0.7 + 0.6 * random(),
    size: 0.7 + 0.5 * random(),
    shade: 0.35 + 0.6 * random(),
    turned: 0, // 0 swims, 1 stands in the waveform
    height: 0,
  }));
}

export const sizeFor = (width) => Math.max(36, Math.min(150, Math.floor(width / SPACE)));

/** Advances one animation frame: moves each fish towards its target. `heights` null lets them swim. */
export function advance(school, heights, { still }) {
  school.forEach((fish, n) => {
    const eager = still ? 1 : 0.05 + 0.05 * fish.pace;
    fish.turned += ((heights ? 1 : 0) - fish.turned) * eager;
    fish.height += ((heights?.[n] ?? 0) - fish.height) * (still ? 1 : 0.25);
  });
}

/** Returns whether every fish is upright and has the height of its bar. */
export function settled(school, bars) {
  const near = (value, target) => Math.abs(value - target) < 0.002;
  return school.every((fish, n) => near(fish.turned, 1) && near(fish.height, bars[n]?.height ?? 0));
}

export function draw(canvas, school, { time, played, colors, speakers }) {
  const { width, height, pen } = prepared(canvas);
  const leader = played === null ? Math.floor(school.length / 2) : Math.floor(played * school.length);
  school.forEach((fish, n) => {
    const swims = swimming(fish, time, width, height);
    const stands = { x: ((n + 0.5) * width) / school.length, y: height / 2, heading: Math.PI / 2 };
    const turned = smooth(fish.turned);
    pen.globalAlpha = opacity(fish, turned, played, n, leader);
    pen.fillStyle = n === leader && (played === null || played < 1) ? colors.lead : colors.speakers[speakers?.[n] ?? 0];
    paint(pen, fish, between(swims, stands, turned), turned, height);
  });
  pen.globalAlpha = 1;
}

function opacity(fish, turned, played, n, leader) {
  const standing = played === null || n <= leader ? 1 : 0.34;
  return fish.shade + (standing - fish.shade) * turned;
}

/** Position of a swimming fish: on the school's loop, with a small offset. */
function swimming(fish, time, width, height) {
  const place = (moment) => {
    const angle = (2 * Math.PI * moment) / LOOP_SECONDS - 1.35 * fish.along;
    const sway = Math.sin(1.1 * moment * fish.pace + 9 * fish.along) * 0.04;
    return {
      x: width * (0.5 + 0.36 * Math.cos(angle) + 0.12 * fish.across),
      y: height * (0.5 + 0.2 * Math.sin(angle) + 0.26 * fish.across + sway),
    };
  };
  const [here, next] = [place(time), place(time + 0.1)];
  return { ...here, heading: Math.atan2(next.y - here.y, next.x - here.x) };
}

function between(from, to, share) {
  // Rotate the shorter way: never more than a quarter turn between swimming and upright.
  const turn = Math.atan2(Math.sin(2 * (to.heading - from.heading)), Math.cos(2 * (to.heading - from.heading))) / 2;
  return {
    x: from.x + (to.x - from.x) * share,
    y: from.y + (to.y - from.y) * share,
    heading: from.heading + turn * share,
  };
}

function paint(pen, fish, { x, y, heading }, turned, height) {
  const bar = Math.max(BAR.min, fish.height * height * BAR.share);
  const length = FISH.length * fish.size * (1 - turned) + bar * turned;
  const width = FISH.width * fish.size * (1 - turned) + BAR.width * turned;
  pen.save();
  pen.translate(x, y);
  pen.rotate(heading);
  if (turned > 0.6) capsule(pen, length, width);
  else leaf(pen, length, width);
  pen.restore();
}

function capsule(pen, length, width) {
  pen.beginPath();
  pen.roundRect(-length / 2, -width / 2, length, width, width / 2);
  pen.fill();
}

/** A body pointed at the nose, and a tail. */
function leaf(pen, length, width) {
  const half = length / 2;
  pen.beginPath();
  pen.moveTo(half, 0);
  pen.quadraticCurveTo(0, -width * 1.1, -half * 0.7, 0);
  pen.quadraticCurveTo(0, width * 1.1, half, 0);
  pen.moveTo(-half * 0.55, 0);
  pen.lineTo(-half * 1.2, -width * 0.55);
  pen.lineTo(-half * 1.05, 0);
  pen.lineTo(-half * 1.2, width * 0.55);
  pen.closePath();
  pen.fill();
}

/** Clears the canvas and matches it to the device pixel ratio. */
function prepared(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const dots = Math.min(2, devicePixelRatio);
  if (canvas.width !== Math.round(width * dots) || canvas.height !== Math.round(height * dots)) {
    canvas.width = Math.round(width * dots);
    canvas.height = Math.round(height * dots);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(dots, 0, 0, dots, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { width, height, pen };
}

const smooth = (share) => share * share * (3 - 2 * share);

function seeded(state) {
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}
