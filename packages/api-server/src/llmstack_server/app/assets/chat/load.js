// The load of the server, read from its metrics while the panel is open.

const load = { samples: [], last: null };

// The sum of a metric over its labels; null where there is none.
function sample(text, name) {
  let sum = null;
  for (const line of text.split("\n")) {
    if (line.startsWith(`${name}{`) || line.startsWith(`${name} `)) {
      sum = (sum ?? 0) + Number(line.slice(line.lastIndexOf(" ") + 1));
    }
  }
  return sum;
}

async function drawLoad() {
  if (!byId("load").open || document.hidden || (server.isLocked && !server.key)) return;
  const text = await (await call("metrics")).text();
  byId("running").textContent = sample(text, "vllm:num_requests_running") ?? "–";
  byId("waiting").textContent = sample(text, "vllm:num_requests_waiting") ?? "–";
  const cache = sample(text, "vllm:kv_cache_usage_perc");
  byId("cache").textContent = cache === null ? "–" : `${(100 * cache).toFixed(1)} %`;
  const now = { tokens: sample(text, "vllm:generation_tokens_total") ?? 0, timeMs: performance.now() };
  const { last } = load;
  load.last = now;
  if (last === null) return;
  const speed = Math.max(0, ((now.tokens - last.tokens) * 1000) / (now.timeMs - last.timeMs));
  byId("speed").textContent = speed.toFixed(1);
  load.samples = [...load.samples, speed].slice(-60);
  const highest = Math.max(...load.samples, 1);
  const points = load.samples.map((value, index) => `${(index * 120) / 59},${31 - (30 * value) / highest}`);
  byId("chart").firstElementChild.setAttribute("points", points.join(" "));
}

const tryToDrawLoad = () => drawLoad().catch((error) => say(error.message));
byId("load").addEventListener("toggle", tryToDrawLoad);
setInterval(tryToDrawLoad, 2000);
