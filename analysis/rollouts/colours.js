// Colours of tokens, as analysis/runs/token_colours.py defines them, and how numbers are written.
"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)");

// Returns the largest finite absolute value of the tokens of some groups, which has the full colour.
function largest(groups, by) {
  let limit = 0;
  for (const rollouts of groups) for (const rollout of rollouts) for (const value of rollout[by] ?? []) {
    const size = Math.abs(value);
    if (size > limit && size < Infinity) limit = size;
  }
  return limit;
}

// Returns red, green and blue behind a token, null where its value is not finite. Where the page is dark, 0 is dark.
function background(value, limit, by) {
  if (!Number.isFinite(value)) return null;
  if (by === "probability") [value, limit] = [1 - value, 1];
  const full = page.colours[by][value < 0 ? 1 : 0], share = limit ? Math.min(Math.abs(value) / limit, 1) : 0;
  const zero = dark.matches ? [24, 28, 32] : [255, 255, 255];
  return full.map((channel, i) => Math.round(zero[i] + (channel - zero[i]) * share));
}

// Returns black or white, whichever is told apart better from a colour: its contrast is at least 4.5.
function ink(colour) {
  const [red, green, blue] = colour.map(channel => {
    const c = channel / 255;
    return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff";
}

// Gives a token the colour of its value; undefined: its file does not have it, and there is no colour.
function paint(element, value, limit, by) {
  const colour = background(value, limit, by);
  element.classList.toggle("not-finite", !colour && value !== undefined);
  element.style.background = colour ? `rgb(${colour})` : "";
  element.style.color = colour ? ink(colour) : "";
}

// Returns a number with three significant digits, a dash where there is none.
function written(value, signed = false) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  const text = size !== 0 && size < 0.001 ? size.toExponential(1) : size >= 1000 ? size.toFixed(0) : String(+size.toPrecision(3));
  return (value < 0 ? "−" : signed && value > 0 ? "+" : "") + text;
}

// Makes an element: node("p", {className: "x"}, "text", child, ...). Text is always text, whatever it looks like.
function node(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children.filter(child => child !== null));
  return element;
}
