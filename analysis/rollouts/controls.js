// The controls of the page: what fills them, what they do, the keys, and the address that leads back to what is shown.
"use strict";
const listed = {places: []}; // what the list of prompts shows

// ---- filters

function filters() {
  const bound = id => $(id).value === "" || !Number.isFinite(+$(id).value) ? null : +$(id).value;
  return {
    lowestReward: bound("lowest-reward"), highestReward: bound("highest-reward"),
    shortest: bound("shortest"), longest: bound("longest"), ending: $("ending").value,
  };
}

function filter() {
  const look = currentLook();
  for (const view of shownViews()) view.filter(look);
  pointed(null, null);
  writeList();
}

function resetFilters() {
  $("filters").reset();
  filter();
}

// ---- what they show

const option = (value, text, selected) => node("option", {value, selected}, text);

function writeControls() {
  const group = page.groups[chosen.place], steps = stepsOf(group.run), at = steps.indexOf(group.step);
  $("run").replaceChildren(...page.runs.map((run, i) => option(i, run.label, i === group.run)));
  $("step").replaceChildren(...steps.map(step => option(step, step, step === group.step)));
  $("earlier").disabled = at === 0;
  $("later").disabled = at === steps.length - 1;
  const others = partners(chosen.place);
  $("beside").replaceChildren(option("", others.length ? "nothing" : "no other has this prompt", chosen.beside === null),
    ...others.map(place => {
      const {run, step} = page.groups[place];
      return option(place, (run === group.run ? "" : page.runs[run].label + ", ") + `step ${step}`, place === chosen.beside);
    }));
  $("beside").disabled = !others.length;
  for (const input of document.getElementsByName("by")) {
    input.checked = input.value === chosen.by;
    input.disabled = !offered(group).includes(input.value);
  }
  $("lacking").textContent = reasons(Object.keys(QUANTITIES).filter(name => !offered(group).includes(name)));
  writeLegend();
  const hasTools = shownViews().some(view => view.group.tools.some(Boolean));
  for (const id of ["fold", "unfold"]) $(id).hidden = !hasTools;
  writeList();
}

// Says why some quantities cannot be chosen. A run records energies and probabilities together, or an older version
// wrote it, which kept fewer quantities.
function reasons(lacking) {
  const recorded = lacking.includes("energy") ? lacking.filter(name => name !== "baseline") : [];
  const older = lacking.filter(name => !recorded.includes(name));
  return [recorded.length ? `This run did not record ${recorded.join(", ")}: log_energy=true does.` : "",
    older.length ? `An older version wrote this run, without ${older.join(", ")}.` : ""].filter(Boolean).join(" ");
}

function writeLegend() {
  const {limit} = shownViews()[0].look, by = chosen.by, signed = by === "advantage";
  const low = by === "advantage" || limitBelow(by) ? -limit : 0, [from, to] = by === "probability" ? [1, 0] : [low, limit];
  const colours = [0, 0.25, 0.5, 0.75, 1].map(share => `rgb(${background(from + (to - from) * share, limit, by)})`);
  $("scale").style.background = `linear-gradient(to right, ${colours})`;
  const none = limit === 0 && by !== "probability";
  $("scale").hidden = none;
  $("scale-low").textContent = none ? "all are 0" : written(from, signed) + (signed ? " less likely" : "");
  $("scale-high").textContent = none ? "" : (signed ? "more likely " : "") + written(to, signed);
}

function limitBelow(by) {
  return shownViews().some(view => view.rollouts.some(rollout => rollout[by]?.some(value => value < 0)));
}

// Lists the prompts of the run and step, or those of the whole page that hold what is searched for.
function writeList() {
  const {run, step} = page.groups[chosen.place], words = $("search").value.trim().toLowerCase(), set = filters();
  const fits = group => group.rollouts.some((_, i) => passes(factsOf(group, i), set));
  const all = words ? [...page.groups.keys()].filter(place => page.groups[place].text.toLowerCase().includes(words))
    : groupsOf(run, step);
  listed.places = all.filter(place => fits(page.groups[place]));
  const shown = listed.places.slice(0, SHOWN_PROMPTS), hidden = all.length - listed.places.length;
  $("prompts").replaceChildren(...shown.map(place => promptItem(place, words !== "")));
  const more = listed.places.length - shown.length;
  $("prompts-found").textContent = `${listed.places.length} prompt${listed.places.length === 1 ? "" : "s"}`
    + (words ? " found in all runs and steps" : "") + (hidden ? `, ${hidden} without a rollout that passes the filters` : "")
    + (more ? `; the first ${SHOWN_PROMPTS} are listed` : "");
  const list = $("prompts"), now = list.querySelector("[aria-current]");
  if (now) list.scrollTop = now.offsetTop - list.offsetTop - list.clientHeight / 3; // the list alone, not the page
}

function promptItem(place, withRun) {
  const group = page.groups[place], scored = group.rewards.filter(reward => reward !== null);
  const mean = scored.length ? written(scored.reduce((sum, reward) => sum + reward, 0) / scored.length) : "–";
  const where = withRun ? `${page.runs[group.run].label}, step ${group.step}, ` : "";
  const button = node("button", {type: "button"}, node("span", {className: "excerpt"}, withoutTags(group.text).slice(0, 300)),
    node("span", {className: "muted"}, `${where}prompt ${group.prompt}, mean reward ${mean}`));
  if (place === chosen.place) button.setAttribute("aria-current", "true");
  button.addEventListener("click", () => choose(place));
  return node("li", {}, button);
}

// ---- the address

function address({side = chosen.side, rollout = chosen.rollout, t = chosen.t} = {}) {
  const group = page.groups[chosen.place], words = {run: page.runs[group.run].name, step: group.step, prompt: group.prompt};
  if (chosen.beside !== null) {
    const other = page.groups[chosen.beside];
    Object.assign(words, {with: page.runs[other.run].name, "with-step": other.step});
  }
  if (chosen.by !== "advantage") words.by = chosen.by;
  if (t !== null) Object.assign(words, side ? {side} : {}, {rollout, token: t + 1});
  return new URLSearchParams(words).toString();
}

// Writes the address of what is shown, a moment later: browsers refuse a hundred changes in a row.
function link() {
  clearTimeout(pending);
  pending = setTimeout(() => history.replaceState(null, "", "#" + address()), 200);
}

// Goes where the address leads; what it does not say, or what is not on this page, stays as it is.
function follow() {
  const words = new URLSearchParams(location.hash.slice(1)), run = name => page.runs.findIndex(run => run.name === words.get(name));
  const find = test => page.groups.findIndex(test);
  const place = find(group => group.run === run("run") && group.step === words.get("step") && group.prompt === +words.get("prompt"));
  if (place >= 0) chosen.place = place;
  const {text} = page.groups[chosen.place];
  const beside = find(group => group.text === text && group.run === run("with") && group.step === words.get("with-step"));
  if (place >= 0) putBeside(beside >= 0 ? beside : null);
  if (words.get("by") in QUANTITIES) chosen.by = words.get("by");
  const goesToToken = place >= 0 && words.has("rollout");
  if (goesToToken) Object.assign(chosen, {side: beside >= 0 ? +words.get("side") : 0, rollout: +words.get("rollout"), t: +words.get("token") - 1});
  return show(goesToToken);
}
