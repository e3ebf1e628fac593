// Perfetto's trace processor, as ui.perfetto.dev runs it in a web worker, without the browser.
//
//   node trace_processor.js DIR <requests >replies
//
// DIR holds Perfetto's web build. Requests and replies are TraceProcessorRpcStream messages, see trace_processor.py.
"use strict";

const fs = require("fs");
const path = require("path");

const web = process.argv[2];

// The only file the worker asks for is its WebAssembly module; it asks by name, and waits.
class ReadFromDisk {
  open(method, name) {
    this.file = path.join(web, path.basename(name));
  }
  send() {
    this.response = fs.readFileSync(this.file);
  }
}

const worker = { location: { href: "http://localhost/" } };
const source = fs.readFileSync(path.join(web, "engine_bundle.js"), "utf8");
// What it takes for a worker: `process` would tell it that this is Node. Its log goes to stderr; stdout is for replies.
const log = { log: console.error, warn: console.error, error: console.error, debug() {}, info() {} };
new Function("self", "WorkerGlobalScope", "XMLHttpRequest", "process", "console", source)(
  worker, Object, ReadFromDisk, undefined, log);

const port = { postMessage: (reply) => fs.writeSync(1, reply) };
worker.onmessage({ data: port });
// The module has started by the next turn of the event loop, and answers each request before it returns.
setTimeout(() => port.onmessage({ data: new Uint8Array(fs.readFileSync(0)) }), 0);
