// What the page holds: facts of every group at once, the numbers of a group when it is looked at. pack.py packs them.
"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
for (const group of page.groups) group.rewards = group.rewards.map(reward => reward === null ? null : +reward);
const QUANTITIES = { // what a token is coloured by -> how it is called, and its sign in the glossary
  "advantage": "A", "baseline": "B", "energy": "W", "score norm": "w", "probability": "π",
};

async function gunzip(base64) {
  const bytes = Uint8Array.from(atob(base64), character => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Puts the bytes of `count` 4-byte values, which lie in planes, back together.
function joined(bytes, start, count) {
  const whole = new Uint8Array(4 * count);
  for (let plane = 0; plane < 4; plane++) {
    const from = start + plane * count;
    for (let i = 0; i < count; i++) whole[4 * i + plane] = bytes[from + i];
  }
  return whole.buffer;
}

const unpacked = new Map(); // the groups looked at last, by their place in page.groups

// Returns the rollouts of a group, each with `tokens` (numbers of page.strings), `own` (places of own tokens in them)
// and an array per quantity, a value per own token. Every rollout also has its facts.
async function rolloutsOf(place) {
  if (unpacked.has(place)) return unpacked.get(place);
  const group = page.groups[place], bytes = await gunzip(document.getElementById("group-" + place).textContent);
  const all = group.shown.reduce((sum, count) => sum + count, 0), owned = group.own.reduce((sum, count) => sum + count, 0);
  const tokens = new Uint32Array(joined(bytes, 0, all)), columns = {};
  group.values.forEach((name, i) => columns[name] = new Float32Array(joined(bytes, 4 * (all + i * owned), owned)));
  let token = 0, value = 0;
  const rollouts = group.rollouts.map((number, i) => {
    const rollout = {...factsOf(group, i), tokens: tokens.subarray(token, token += group.shown[i]), own: []};
    rollout.tokens.forEach((number, place) => { if (number < 2 ** 31) rollout.own.push(place); });
    for (const name in columns) rollout[name] = columns[name].subarray(value, value + group.own[i]);
    value += group.own[i];
    if (rollout.log_prob) rollout.probability = rollout.log_prob.map(Math.exp);
    if (rollout["score norm"]) {
      let energy = 0;
      rollout.energy = Float64Array.from(rollout["score norm"], w => energy += w);
    }
    return rollout;
  });
  if (unpacked.size > 7) unpacked.delete(unpacked.keys().next().value);
  unpacked.set(place, rollouts);
  return rollouts;
}

function factsOf(group, i) {
  return {
    number: group.rollouts[i], reward: group.rewards[i], ending: group.endings?.[i], length: group.lengths[i],
    tools: group.tools[i], cut: group.lengths[i] + group.tools[i] - group.shown[i],
  };
}

function tokenText(rollout, place) {
  return page.strings[rollout.tokens[place] % 2 ** 31];
}

// Returns a text without the marks of chat templates, which say who speaks, and without line ends.
function withoutTags(text) {
  return text.replace(/<\|[^|>]*\|>(system|user|assistant|tool)?/g, " ").replace(/[\s\u21b5]+/g, " ").trim() || text;
}

// Returns the quantities that a group can be coloured by.
function offered(group) {
  const has = name => group.values.includes(name);
  const source = {"energy": "score norm", "probability": "log_prob"};
  return Object.keys(QUANTITIES).filter(name => has(source[name] ?? name));
}

// Returns the places of the groups of a run and step, in the order of their prompts.
function groupsOf(run, step) {
  return [...page.groups.keys()].filter(place => page.groups[place].run === run && page.groups[place].step === step);
}

// Returns the places of other groups of the same prompt: of other steps, or of other runs.
function partners(place) {
  const text = page.groups[place].text;
  return [...page.groups.keys()].filter(other => other !== place && page.groups[other].text === text);
}

// Tells whether a rollout passes the filters; a bound that is not set is null. Unscored ones fail bounds of the reward.
function passes(rollout, filters) {
  const within = (value, low, high) => (low === null || value !== null && value >= low)
    && (high === null || value !== null && value <= high);
  return within(rollout.reward, filters.lowestReward, filters.highestReward)
    && within(rollout.length, filters.shortest, filters.longest) && (!filters.ending || rollout.ending === filters.ending);
}

const CALL = /<tool_call>[\s\S]*?(?:<\/tool_call>|$)/g;

// Cuts a rollout into parts {kind, from, to}, places of its tokens: "text", "call" and "output" of a tool.
function partsOf(rollout) {
  const parts = [], isTool = place => rollout.tokens[place] >= 2 ** 31, count = rollout.tokens.length;
  const add = (kind, from, to) => { if (to > from) parts.push({kind, from, to}); };
  for (let from = 0, to; from < count; from = to) {
    for (to = from; to < count && isTool(to) === isTool(from);) to++;
    if (isTool(from)) { add("output", from, to); continue; }
    const starts = [0];
    for (let place = from; place < to; place++) starts.push(starts.at(-1) + tokenText(rollout, place).length);
    const text = Array.from({length: to - from}, (_, i) => tokenText(rollout, from + i)).join("");
    let done = from;
    for (const match of text.matchAll(CALL)) {
      const first = starts.findLastIndex(start => start <= match.index);
      const last = starts.findIndex(start => start >= match.index + match[0].length);
      add("text", done, from + first);
      add("call", from + first, done = from + last);
    }
    add("text", done, to);
  }
  return parts;
}
