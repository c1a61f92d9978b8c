// Where one is is in the address: #/, #/group/G, #/rollout/G/S.
import {chart, get, h, number, percent, range, table} from "/parts.js";
import {rollout} from "/rollout.js";

const POLL_MS = 3000, MOST = 200;  // between two looks at a run that goes on; rows shown at once
const CURVES = ["solved", "best", "reward", "heldout/mean", "heldout/best", "staleness", "samples_per_s", "tokens_per_s", "loss",
  "gradient_norm", "mismatch", "largest_log_ratio"];
const main = document.querySelector("main");
const kept = {key: "group", order: -1, text: "", step: "", status: "", shown: MOST};  // how the list of groups is looked at
let visit = 0;  // counts the places shown: what was asked for an earlier one is dropped

async function show() {
  const own = ++visit, [, place, ...numbers] = location.hash.split("/");
  const ask = {group: group, rollout: rollout}[place] || overview;
  try {
    await ask(numbers.map(Number), content => own === visit && (main.replaceChildren(...content), true));
  } catch (error) {
    if (own === visit) main.replaceChildren(h("p", {}, h("a", {href: "#/"}, "all groups")), h("p", {class: "error"}, error.message));
  }
}

async function overview(_, put) {
  let before = "", list = null;
  const top = h("div", {}), groups = h("div", {});
  if (!put([top, groups])) return;
  for (let failures = 0; top.isConnected;) {
    let left = 0;
    try {
      const [run, found] = await Promise.all([get("run"), get("groups")]);
      [left, failures] = [found.left, 0];
      const now = JSON.stringify([run, found]);
      if (now !== before) {
        const open = [...top.querySelectorAll("details[open]")].map(element => element.className);
        top.replaceChildren(...head(run, found));
        for (const name of open) for (const element of top.querySelectorAll(`details.${name}`)) element.open = true;
        list = list || groupList(groups);
        list(found.rows);
      }
      before = now;
    } catch (error) {
      if (!before && ++failures > 3) throw error;
    }
    await new Promise(done => setTimeout(done, left ? 0 : POLL_MS));
  }
}

function head(run, found) {
  document.title = `Rollouts of ${run.run}`;
  const state = run.state, damaged = [...run.damaged, ...found.damaged];
  const counts = state ? Object.entries(state.counts).filter(([, count]) => count).map(([name, count]) => `${count} ${name}`) : [];
  const told = state ? `${state.step} steps taken, samplers at version ${state.version}; samples: ${counts.join(", ") || "none"}` : "";
  const curves = [...CURVES, ...Object.keys(run.curves).filter(name => !CURVES.includes(name))].filter(name => run.curves[name]);
  const drawn = names => h("div", {class: "curves"}, names.map(name => chart(name, run.curves[name])));
  const first = curves.filter(name => CURVES.includes(name)), rest = curves.filter(name => !CURVES.includes(name));
  const rows = run.evaluations.map(e => [e.name, number(e.version), number(e.tasks), number(e.samples),
    `${percent(e.mean)} ± ${percent(e.mean_error)}`, `${percent(e.best)} ± ${percent(e.best_error)}`, percent(e.parsed),
    number(e.calls), number(e.tokens)]);
  return [
    h("h1", {}, run.run), h("p", {class: "faint"}, told, found.left ? ` ${found.left} rollouts are still to be read.` : ""),
    run.alarms ? h("p", {class: "error"}, `alarms: ${run.alarms}`) : "",
    damaged.length ? h("details", {class: "damaged"}, h("summary", {class: "error"}, `${damaged.length} damaged`),
      damaged.map(each => h("div", {}, `${each.file}: ${each.reason}`))) : "",
    drawn(first),
    rest.length ? h("details", {class: "more"}, h("summary", {}, "more curves"), drawn(rest)) : "",
    rows.length ? h("h2", {}, "Held-out tasks") : "",
    rows.length ? table(["evaluation", "version", "tasks", "samples", "mean", "best of samples", "calls parse", "calls", "tokens"], rows,
      {id: "evaluations"}) : "",
    run.config ? h("details", {class: "config"}, h("summary", {}, "Configuration"), h("pre", {}, JSON.stringify(run.config, null, 1)))
      : "",
  ];
}

const COLUMNS = [["group", "group"], ["step", "step"], ["prompt", "prompt"], ["samples", "samples"], ["solved", "mean"],
  ["best", "best"], ["reward", "reward"], ["newest", "versions"], ["tokens", "tokens"], ["statuses", "statuses"]];

// Puts the list into a place; returns what is to be called with new rows.
function groupList(place) {
  let rows = [];
  const change = (name, value) => { kept[name] = value; kept.shown = MOST; draw(); };
  const text = h("input", {id: "filter", placeholder: "prompt", value: kept.text, oninput: e => change("text", e.target.value)});
  const step = h("input", {placeholder: "step", size: 5, value: kept.step, oninput: e => change("step", e.target.value)});
  const status = h("select", {onchange: e => change("status", e.target.value)});
  const count = h("span", {class: "faint"});
  const heads = COLUMNS.map(([key, name]) => h("th", {"data-key": key, onclick: () => {
    [kept.order, kept.key] = [key === kept.key ? -kept.order : -1, key];
    draw();
  }}, name));
  const body = table(heads, [], {id: "groups"}), more = h("button", {onclick: () => { kept.shown *= 4; draw(); }}, "show more");
  place.replaceChildren(h("h2", {}, "Groups"), h("div", {class: "bar"}, text, step, status, count), body, more);

  const value = row => (kept.key === "statuses" ? statuses(row) : row[kept.key]);
  const rank = v => (v === null || v === undefined ? -Infinity : v);
  function compare(a, b) {
    const [x, y] = [rank(value(a)), rank(value(b))];
    return kept.order * (typeof x === "string" && typeof y === "string" ? x.localeCompare(y, "en", {numeric: true}) : x - y || 0);
  }
  function draw() {
    const names = [...new Set(rows.flatMap(row => Object.keys(row.statuses)))].sort();
    status.replaceChildren(h("option", {value: ""}, "any status"),
      ...names.map(name => h("option", {value: name, selected: name === kept.status}, name)));
    const fits = row => row.prompt.includes(kept.text) && (!kept.step || String(row.step) === kept.step.trim())
      && (!kept.status || row.statuses[kept.status]);
    const chosen = rows.filter(fits).sort(compare), shown = chosen.slice(0, kept.shown);
    for (const head of heads) head.dataset.order = head.dataset.key === kept.key ? kept.order : 0;
    body.querySelector("tbody").replaceChildren(...shown.map(groupRow));
    count.textContent = `${chosen.length} of ${rows.length} groups`;
    more.hidden = chosen.length <= shown.length;
  }
  return found => { rows = found; draw(); };
}

const statuses = row => [...Object.entries(row.statuses).map(([name, count]) => `${count} ${name}`),
  ...(row.damaged ? [`${row.damaged} damaged`] : [])].join(", ");

function groupRow(row) {
  const link = h("a", {href: `#/group/${row.group}`}, number(row.group));
  const cells = [link, row.step === null ? "not trained" : number(row.step), row.prompt, number(row.samples), percent(row.solved),
    percent(row.best), number(row.reward), range(row.oldest, row.newest), number(row.tokens), statuses(row)];
  return h("tr", {}, cells.map(cell => h("td", {}, cell)));
}

async function group([id], put) {
  const found = await get(`group/${id}`);
  document.title = `Group ${id}`;
  const heads = ["sample", "status", "solved", "reward", "advantage", "versions", "segments", "tokens", "calls", "invalid", "changed lines",
    "seconds", ""];
  const rows = found.rollouts.map(r => {
    if (r.reason) return [number(r.sample), h("span", {class: "error"}, `damaged: ${r.reason}`)];
    const link = h("a", {href: `#/rollout/${id}/${r.sample}`}, number(r.sample));
    return [link, r.status, percent(r.solved), r.reward === null ? "of no part" : number(r.reward), number(r.advantage),
      range(r.oldest, r.newest), number(r.segments), number(r.tokens), number(r.calls), number(r.invalid), number(r.changed),
      number(r.seconds), h("span", {class: "error"}, r.error)];
  });
  const step = found.step === null ? "not trained yet: advantages are of what is there"
    : `trained in step ${found.step}, on weights of version ${found.step - 1}`;
  const note = found.damaged ? `; ${found.damaged} damaged: advantages are without` : "";
  put([h("p", {}, h("a", {href: "#/"}, "all groups")), h("h1", {}, `Group ${id}: ${found.prompt}`), h("p", {class: "faint"}, step + note),
    table(heads, rows, {id: "rollouts"})]);
}

addEventListener("hashchange", show);
show();
