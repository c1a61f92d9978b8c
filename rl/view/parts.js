// Elements, numbers and charts. Texts become text nodes: nothing of a run is ever read as HTML.

export function h(name, attributes, ...children) {
  const svg = ["svg", "polyline", "circle", "path", "text"].includes(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== ""));
  return element;
}

export async function get(path) {
  let response;
  try {
    response = await fetch(`/api/${path}`);
  } catch {
    throw new Error("the server does not answer");
  }
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;  // nan, inf
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(digits)));
}

export const percent = value => (typeof value === "number" ? `${(100 * value).toFixed(1)} %` : number(value));
export const range = (low, high) => (low === high ? number(low) : `${number(low)}–${number(high)}`);

export function table(heads, rows, attributes = {}) {
  const cells = row => h("tr", {}, row.map(cell => h("td", {}, cell)));
  const line = h("tr", {}, heads.map(head => (head instanceof Node ? head : h("th", {}, head))));
  return h("div", {class: "wide"}, h("table", attributes, h("thead", {}, line), h("tbody", {}, rows.map(cells))));
}

// points: [step, value or null] in order. A value that was not finite is left out of the line and counted.
export function chart(name, points) {
  const [width, height, left, bottom] = [225, 90, 46, 14];
  const known = points.filter(point => typeof point[1] === "number");
  const missing = points.length - known.length;
  const xs = known.map(point => point[0]), ys = known.map(point => point[1]);
  let [low, high] = [Math.min(...ys), Math.max(...ys)];
  if (low === high) [low, high] = [low - 0.5 * (Math.abs(low) || 1), high + 0.5 * (Math.abs(high) || 1)];
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const px = x => left + ((x - first) / (last - first || 1)) * (width - left - 6);
  const py = y => 6 + ((high - y) / (high - low)) * (height - bottom - 12);
  const tick = y => (y && Math.abs(y) < 1e-3 ? y.toExponential(1) : number(y, 3));
  const at = known.map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`);
  const parts = [h("path", {class: "axis", d: `M${left} ${py(low)}H${width}M${left} ${py(high)}H${width}`})];
  for (const y of [low, high]) parts.push(h("text", {x: left - 4, y: py(y) + 4, "text-anchor": "end"}, tick(y)));
  parts.push(h("text", {x: left, y: height - 2}, `step ${first}`), h("text", {x: width, y: height - 2, "text-anchor": "end"}, `${last}`));
  parts.push(h("polyline", {points: at.join(" ")}));
  if (known.length < 40) for (const [x, y] of known) parts.push(h("circle", {cx: px(x), cy: py(y), r: 2}));
  const note = missing ? h("span", {class: "error"}, `, ${missing} not finite`) : "";
  const now = known.length ? number(ys[ys.length - 1], 4) : "no value";
  const drawing = known.length ? h("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name}, parts) : "";
  return h("figure", {}, h("figcaption", {}, `${name}: ${now}`, note), drawing);
}
