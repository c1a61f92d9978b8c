// One rollout: what it earned, its turns, its patch, its tokens in the colours of a quantity.
import {get, h, number, percent, table} from "/parts.js";

const MOST_TOKENS = 20000;  // of a segment at once
const QUANTITIES = [["mask", "mask"], ["advantage", "advantage"], ["log_prob", "log-prob"], ["gap", "log-prob gap"],
  ["version", "version"], ["expert", "experts"]];
const chosen = {quantity: "advantage", layer: 0};  // kept from one rollout to the next

export async function rollout([group, sample], put) {
  const found = await get(`rollout/${group}/${sample}`);
  document.title = `Rollout ${sample}: ${found.prompt}`;
  const link = (other, text) => (other === null ? "" : h("a", {href: `#/rollout/${group}/${other}`}, text));
  const [before, after] = found.neighbours;
  const extra = (found.trajectory || {}).extra || {}, where = found.where || {};
  const facts = [["status", found.status], ["solved", percent(found.solved)], ["advantage", number(found.advantage)],
    ["step", found.step === null ? "not trained" : number(found.step)], ["ended by", extra.end || ""], ["seconds", number(found.seconds)],
    ["attempt", number(where.attempt)], ["worker", where.worker || ""]];
  const parts = [...Object.entries(found.reward.parts).map(([name, value]) => [name, number(value)]),
    [h("b", {}, "reward"), h("b", {}, found.reward.total === null ? "of no part in its group" : number(found.reward.total))]];
  const behaviours = Object.entries(found.behaviours || {}).filter(([, share]) => share).map(([name, share]) => `${name} ${number(share)}`);
  const errors = [found.reward.error, extra.error, ...(extra.faults || [])].filter(Boolean);
  put([
    h("div", {class: "bar"}, h("a", {href: "#/"}, "all groups"), h("a", {href: `#/group/${group}`}, `group ${group}`),
      link(before, "previous"), link(after, "next")),
    h("h1", {}, `Rollout ${sample}: ${found.prompt}`),
    table(facts.map(fact => fact[0]), [facts.map(fact => fact[1])], {id: "facts"}),
    errors.map(text => h("p", {class: "error"}, text)),
    h("h2", {}, "Reward"), table(["part", "value"], parts, {id: "reward"}),
    behaviours.length ? h("p", {class: "faint"}, `behaviours: ${behaviours.join(", ")}`) : "",
    h("h2", {}, "Tokens"), tokens(found, group, sample),
    h("h2", {}, "Turns"), ...((found.trajectory || {}).steps || []).map(turn),
    (extra.todos || []).length ? h("pre", {}, JSON.stringify(extra.todos, null, 1)) : "",
    h("h2", {}, "Changes of the environment"), found.patch ? patch(found.patch) : h("p", {class: "faint"}, "none"),
  ]);
}

function turn(step, i, steps) {
  const segment = (step.extra || {}).segment || 0;
  const isNew = i && segment !== ((steps[i - 1].extra || {}).segment || 0);
  const results = ((step.observation || {}).results || []);
  const metrics = step.metrics || {};
  const told = metrics.completion_tokens === undefined ? "" : ` ${metrics.prompt_tokens} + ${metrics.completion_tokens} tokens`;
  const calls = (step.tool_calls || []).map(call => {
    const result = results.find(each => each.source_call_id === call.tool_call_id);
    const malformed = (call.extra || {}).malformed;
    const written = malformed === undefined ? JSON.stringify(call.arguments, null, 1) : malformed;
    const kind = result && result.extra ? result.extra.kind : "";
    return [h("div", {}, h("span", {class: "call"}, call.function_name), " ", h("span", {class: kind === "ok" ? "ok" : "bad"}, kind)),
      h("pre", {}, written), result ? h("pre", {class: "output"}, result.content) : ""];
  });
  return h("div", {class: `turn ${step.source}`}, isNew ? h("h3", {}, `after summary ${segment}`) : "",
    h("b", {}, step.source), h("span", {class: "faint"}, told),
    step.reasoning_content ? h("details", {}, h("summary", {}, "thinking"), h("pre", {}, step.reasoning_content)) : "",
    step.message ? h("pre", {}, step.message) : "", calls);
}

function patch(text) {
  const kind = line => ({"+": "add", "-": "del"})[line[0]] || "";
  return h("pre", {id: "patch"}, text.split("\n").map(line => [h("span", {class: kind(line)}, line), "\n"]));
}

// The row of quantities, what is under the pointer, and the segments, one after the other.
function tokens(found, group, sample) {
  const data = {gaps: null, experts: {}, note: "", largest: 0};
  const about = h("div", {class: "about"}, found.note || "point at a token"), legend = h("span", {class: "faint", id: "legend"});
  const layers = h("select", {id: "layer", onchange: e => { chosen.layer = Number(e.target.value); choose("expert"); }},
    Array.from({length: found.layers}, (_, i) => h("option", {value: i, selected: i === chosen.layer}, `MoE layer ${i}`)));
  const buttons = QUANTITIES.map(([key, name]) => h("button", {"data-quantity": key, onclick: () => choose(key)}, name));
  const shown = found.segments.map(() => []);  // elements of tokens, by segment
  const tell = (s, i) => { about.textContent = described(found, data, s, i); };

  async function choose(quantity) {
    chosen.quantity = quantity;
    if (chosen.layer >= found.layers) chosen.layer = 0;
    for (const button of buttons) button.setAttribute("aria-pressed", button.dataset.quantity === quantity);
    layers.hidden = quantity !== "expert" || !found.layers;
    legend.textContent = "...";
    try {
      if (quantity === "gap" && !data.gaps) take(await get(`gaps/${group}/${sample}`));
      const {layer} = chosen;
      if (quantity === "expert" && !data.experts[layer]) data.experts[layer] = await get(`experts/${group}/${sample}/${layer}`);
      if (chosen.quantity !== quantity) return;
      legend.textContent = legends(found, data)[quantity];
      shown.forEach((elements, s) => elements.forEach((_, i) => paint(s, i)));
    } catch (error) {
      if (chosen.quantity !== quantity) return;
      legend.textContent = error.message;
      shown.forEach(elements => elements.forEach(element => { element.style.background = ""; }));
    }
  }
  function take(answer) {
    data.gaps = answer.gaps;
    data.largest = answer.gaps.flat().reduce((most, gap) => (typeof gap === "number" ? Math.max(most, Math.abs(gap)) : most), 0);
    const from = answer.source === "weights" ? "version" : "checkpoint of version";
    data.note = `learner (${from} ${answer.version}) less sampler`
      + (answer.wanted === null ? ", not trained yet" : answer.wanted === answer.version ? ", as in its step"
        : `; its step trained version ${answer.wanted}`);
  }
  function paint(s, i) {
    const value = valueOf(found, data, s, i), element = shown[s][i];
    element.classList.toggle("nonfinite", typeof value === "string");
    element.style.background = typeof value === "number" ? colour(value, found, data) : "";
  }
  function draw(place, s, button) {
    const segment = found.segments[s], from = shown[s].length, to = Math.min(segment.ids.length, from + MOST_TOKENS);
    for (let i = from; i < to; i++) {
      const text = segment.texts ? segment.texts[i] : `·${segment.ids[i]} `;
      const element = h("span", {class: segment.mask[i] ? "own" : "masked", onmouseenter: () => tell(s, i)}, text.replaceAll("\n", "↵\n") || "∅");
      shown[s].push(element);
      place.append(element);
      if (from) paint(s, i);
    }
    button.hidden = to === segment.ids.length;
  }
  const blocks = found.segments.map((segment, s) => {
    const own = segment.mask.filter(Boolean).length, place = h("div", {class: "tokens"});
    const more = h("button", {onclick: () => draw(place, s, more)}, "show more");
    draw(place, s, more);
    const origin = s ? `; its first ${segment.shared} tokens are those of the segment before` : "";
    return [h("h3", {}, `Segment ${s + 1} of ${found.segments.length}: ${segment.ids.length} tokens, ${own} of the model${origin}`), place, more];
  });
  choose(chosen.quantity);
  return h("div", {id: "tokens"}, h("div", {class: "bar"}, buttons, layers, legend), about, blocks);
}

// A number to be coloured; a string where it is not finite; null: the token has none.
function valueOf(found, data, s, i) {
  const segment = found.segments[s], own = segment.mask[i];
  if (chosen.quantity === "expert") {
    const ids = (data.experts[chosen.layer] || [])[s];
    return ids && ids[i].length && ids[i][0] >= 0 ? ids[i][0] : null;
  }
  if (!own) return null;
  if (chosen.quantity === "mask") return 1;
  if (chosen.quantity === "advantage") return found.advantage ?? null;
  if (chosen.quantity === "log_prob") return segment.log_probs[i];
  if (chosen.quantity === "version") return segment.versions[i];
  return data.gaps ? data.gaps[s][i] : null;
}

const category = i => `hsl(${(210 + 137.5 * i) % 360} 65% 82%)`;
const signed = share => `hsl(${share >= 0 ? 140 : 5} 65% ${96 - 34 * Math.min(1, Math.abs(share))}%)`;

function colour(value, found, data) {
  if (chosen.quantity === "mask") return "#d8e6f5";
  if (chosen.quantity === "advantage") return signed(value / (found.largest_advantage || 1));
  if (chosen.quantity === "log_prob") return `hsl(30 90% ${97 - 40 * Math.min(1, -value / 5)}%)`;
  if (chosen.quantity === "gap") return signed(value / (data.largest || 1));
  return category(value);
}

function legends(found, data) {
  return {
    mask: "blue: chosen by the model, trained; grey: read, of no part in the loss",
    advantage: `${number(found.advantage)}: reward less its group's mean; full colour at ±${number(found.largest_advantage)}`,
    log_prob: "the sampler's; full colour at -5 and below",
    gap: `${data.note}; full colour at ±${number(data.largest)}`,
    version: "of the weights that chose the token, one colour each",
    expert: found.layers ? "coloured by the first that the layer chose" : "not recorded",
  };
}

function described(found, data, s, i) {
  const segment = found.segments[s], parts = [`token ${i}`, `id ${segment.ids[i]}`];
  if (segment.texts) parts.push(JSON.stringify(segment.texts[i]));
  if (segment.mask[i]) {
    parts.push(`log-prob ${number(segment.log_probs[i], 5)}`, `version ${segment.versions[i]}`, `advantage ${number(found.advantage)}`);
    if (data.gaps) parts.push(`gap ${number(data.gaps[s][i], 4)}`);
  } else parts.push("not the model's");
  for (const [layer, segments] of Object.entries(data.experts)) {
    if (segments[s] && segments[s][i][0] >= 0) parts.push(`layer ${layer}: experts ${segments[s][i].join(", ")}`);
  }
  return parts.join(" · ");
}
