// One prompt group on the page: its head, its charts, its rollouts one above the other. Two of them stand side by side.
"use strict";
class GroupView {
  // onPoint(view, rollout, t, chosen) is called where a token is pointed at, or chosen; t counts own tokens from 0.
  constructor(section, onPoint) {
    Object.assign(this, {section, onPoint, rollouts: [], charts: [], waiting: [], frame: null});
    this.seen = new IntersectionObserver(entries => {
      this.waiting.push(...entries.filter(entry => entry.isIntersecting).map(entry => entry.target.rollout));
      this.fillNext();
    }, {rootMargin: "800px"});
  }

  // Fills the rollouts that came near the window, one a frame, so that scrolling does not wait for them.
  fillNext() {
    if (this.frame || !this.waiting.length) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      const rollout = this.waiting.shift();
      if (rollout) this.fill(rollout);
      this.fillNext();
    });
  }

  // look: {by, limit, extents, filters, folded}, the same for both sides.
  show(place, rollouts, look) {
    const group = page.groups[place];
    Object.assign(this, {place, group, rollouts, look, waiting: []});
    this.seen.disconnect();
    this.perLine = Math.max(20, this.section.clientWidth / 8.5);
    rollouts.forEach((rollout, i) => rollout.colour = page.lines[i % page.lines.length]);
    this.figures = node("div", {className: "charts"});
    this.list = node("div", {className: "rollouts"}, ...rollouts.map(rollout => this.article(rollout)));
    const cuts = group.cuts.map(cut => node("p", {className: "note"}, cut));
    this.section.replaceChildren(this.head(), ...cuts, this.figures, this.list);
    this.filter(look);
    for (const rollout of rollouts) this.seen.observe(rollout.article);
  }

  head() {
    const run = page.runs[this.group.run], chip = node("span", {className: "chip"});
    chip.style.background = run.colour;
    this.count = node("span", {className: "count", role: "status"});
    return node("header", {}, node("h2", {}, chip, run.label), run.label.includes(run.name) ? null : node("p", {className: "muted"}, run.name),
      node("p", {}, `step ${this.group.step}, prompt ${this.group.prompt}, `, this.count));
  }

  article(rollout) {
    const mark = node("span", {className: rollout.reward > 0 ? "swatch" : "swatch dashed"});
    mark.style.setProperty("--line", rollout.colour);
    const title = node("h3", {}, mark, `rollout ${rollout.number}`), area = node("div", {className: "tokens", tabIndex: 0});
    area.setAttribute("role", "group");
    area.setAttribute("aria-label", `tokens of rollout ${rollout.number}; the arrow keys move`);
    const facts = headline(rollout).map(([text, name]) => node("span", {className: name}, text));
    const cut = rollout.cut ? node("p", {className: "note"}, `${rollout.cut.toLocaleString("en")} more tokens are not on this page`) : null;
    rollout.article = node("article", {}, node("div", {className: "headline"}, title, ...facts), area, cut);
    Object.assign(rollout, {area, spans: null});
    Object.assign(rollout.article, {rollout});
    area.rollout = rollout;
    const characters = rollout.tokens.reduce((sum, _, place) => sum + tokenText(rollout, place).length, 0);
    area.style.minHeight = `${1.75 * Math.ceil(characters / this.perLine)}em`; // about its height, until it is filled
    return rollout.article;
  }

  // Writes the tokens of a rollout, when it comes near the window.
  fill(rollout) {
    if (rollout.spans) return;
    this.seen.unobserve(rollout.article);
    rollout.spans = [];
    for (const part of partsOf(rollout)) rollout.area.append(this.written(rollout, part));
    rollout.area.style.minHeight = "";
    this.paint(rollout);
  }

  written(rollout, {kind, from, to}) {
    const content = node("span", {className: kind});
    if (kind === "output") {
      for (let place = from; place < to; place++) content.append(tokenText(rollout, place));
    } else for (let place = from; place < to; place++) {
      const span = node("span", {className: "t"}, tokenText(rollout, place) || "∅");
      span.t = rollout.spans.push(span) - 1;
      content.append(span);
    }
    if (kind === "text") return content;
    const preview = kind === "output" ? node("span", {className: "preview"}, withoutTags(content.textContent).slice(0, 80)) : null;
    const fold = node("details", {className: "tool", open: this.look.folded === null ? kind === "call" : !this.look.folded});
    fold.append(node("summary", {}, `tool ${kind}, ${to - from} tokens `, preview), content);
    return fold;
  }

  paint(rollout) {
    const values = rollout[this.look.by] ?? [];
    rollout.spans?.forEach((span, t) => paint(span, values[t], this.look.limit, this.look.by));
  }

  recolour(look) {
    this.look = look;
    for (const rollout of this.rollouts) this.paint(rollout);
  }

  // Shows the rollouts that pass the filters, and draws the charts of these.
  filter(look) {
    this.look = look;
    for (const rollout of this.rollouts) rollout.article.hidden = !passes(rollout, look.filters);
    this.visible = this.rollouts.filter(rollout => !rollout.article.hidden);
    const scored = this.visible.map(rollout => rollout.reward).filter(reward => reward !== null);
    const mean = scored.length ? `, mean reward ${written(scored.reduce((sum, reward) => sum + reward, 0) / scored.length)}` : "";
    const all = this.rollouts.length, shown = this.visible.length;
    this.count.textContent = (shown === all ? `${all} rollouts` : `${shown} of ${all} rollouts`) + mean;
    this.drawCharts();
  }

  drawCharts() {
    this.charts = [];
    this.figures.replaceChildren();
    for (const [quantity, extent] of Object.entries(this.look.extents)) {
      if (!offered(this.group).includes(quantity)) continue;
      const host = this.figures.appendChild(node("figure"));
      this.charts.push([host, () => new Chart(host, quantity, this.visible, extent,
        (rollout, t, chosen) => this.onPoint(this, rollout, t, chosen))]);
    }
    this.charts = this.charts.map(([, made]) => made()); // once all figures stand, as they share the width
  }

  redraw() {
    for (const chart of this.charts) chart.draw();
  }

  // Marks a token, of this group or of the one beside it; t undefined: none.
  point(rollout, t, chosen) {
    for (const chart of this.charts) chart.point(rollout, t);
    if (!this.rollouts.includes(rollout)) return null;
    this.fill(rollout);
    const span = rollout.spans[t];
    for (let fold = span?.closest("details"); chosen && fold; fold = fold.parentElement.closest("details")) fold.open = true;
    return span;
  }
}

// Returns what stands above a rollout's tokens, in the words of `analysis.runs.show`: [text, class] each.
function headline(rollout) {
  const facts = [[rollout.reward === null ? "unscored" : `reward ${written(rollout.reward)}`, "reward"]];
  facts.push([`${rollout.length.toLocaleString("en")} tokens`, ""]);
  if (rollout.tools) facts.push([`${rollout.tools.toLocaleString("en")} tool tokens`, ""]);
  if (rollout.ending && rollout.ending !== "end") facts.push([page.endings[rollout.ending] ?? rollout.ending, "badge"]);
  const advantages = rollout.advantage, signed = value => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(3);
  if (advantages?.length) {
    let [low, high] = [Infinity, -Infinity];
    for (const value of advantages) [low, high] = [Math.min(low, value), Math.max(high, value)];
    facts.push([`advantage ${signed(low)}` + (high !== low ? ` to ${signed(high)}` : ""), "minor"]);
  }
  if (rollout.energy?.length) facts.push([`energy ${rollout.energy.at(-1).toFixed(2)}`, "minor"]);
  return facts;
}
