"use strict";
// What pages do besides being read: verdicts come in one after another, what-if answers in place, and a live page
// follows its job. All markup comes from the server, which has escaped it.
(() => {
  // Puts new markup in, and leaves focus and scrolled tables where they were.
  function swap(place, markup) {
    const focused = document.activeElement && place.contains(document.activeElement) ? document.activeElement.id : "";
    const scrolled = [...place.querySelectorAll(".scroll[id]")].map((each) => [each.id, each.scrollLeft]);
    place.innerHTML = markup;
    for (const [id, left] of scrolled) {
      const again = document.getElementById(id);
      if (again) again.scrollLeft = left;
    }
    const again = focused && document.getElementById(focused);
    if (again) again.focus({ preventScroll: true });
  }

  // -- verdicts, in the list of captures and of a job that has ended
  async function briefs() {
    for (const cell of document.querySelectorAll("[data-brief]")) {
      try {
        const answer = await fetch(cell.dataset.brief);
        if (answer.ok) cell.innerHTML = await answer.text();
      } catch {
        return; // the server is gone
      }
    }
  }

  // -- what if
  function whatIf(form) {
    const tried = document.getElementById("tried"), fault = document.getElementById("fault");
    const chart = document.querySelector(".timeline");
    let asked = 0;

    async function ask(query) {
      const number = ++asked;
      let answer;
      try {
        const response = await fetch(`${form.dataset.tried}?${query}`);
        if (!response.ok) throw new Error(`the server answers ${response.status}`);
        answer = await response.json();
      } catch (wrong) {
        if (number === asked) fault.textContent = `No answer from megaprof ui: ${wrong.message}.`;
        return;
      }
      if (number !== asked) return; // a later question is under way
      fault.textContent = answer.fault === null ? "" : answer.fault.replace(/\.?$/, ".");
      if (answer.fault !== null) return;
      swap(tried, answer.html);
      chart.dispatchEvent(new CustomEvent("boxes", { detail: answer.boxes }));
      for (const [name, value] of new URLSearchParams(answer.query)) {
        const field = form.elements.namedItem(name);
        // Not under the fingers of whoever is typing a number.
        if (field && !(field === document.activeElement && field.type === "number")) field.value = value;
      }
      history.replaceState(null, "", `?${answer.query}`);
    }

    const filled = () => new URLSearchParams(new FormData(form)).toString();
    form.addEventListener("submit", (event) => { event.preventDefault(); ask(filled()); });
    form.addEventListener("change", () => ask(filled()));
    tried.addEventListener("click", (event) => {
      const link = event.target.closest("a[data-try]");
      if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
        event.preventDefault();
        link.focus();
        ask(link.search.slice(1));
      }
      const button = event.target.closest("button[data-copy]");
      if (button) copy(button);
    });

    let dragged = null;
    tried.addEventListener("dragstart", (event) => {
      const layer = event.target.closest("[draggable]");
      if (!layer) return;
      dragged = { from: layer.closest("[data-piece]").dataset.piece, letter: layer.dataset.letter || "t" };
      event.dataTransfer.effectAllowed = "move";
      event.dataTransfer.setData("text/plain", "layer");
    });
    const target = (event) => (dragged ? event.target.closest("[data-piece]") : null);
    const mark = (piece) => {
      for (const each of tried.querySelectorAll(".over")) if (each !== piece) each.classList.remove("over");
      if (piece) piece.classList.add("over");
    };
    tried.addEventListener("dragover", (event) => {
      const piece = target(event);
      if (piece) event.preventDefault();
      mark(piece);
    });
    tried.addEventListener("dragend", () => { dragged = null; mark(null); });
    tried.addEventListener("drop", (event) => {
      const piece = target(event);
      if (!piece) return;
      event.preventDefault();
      const { from, letter } = dragged;
      dragged = null;
      mark(null);
      if (piece.dataset.piece !== from) ask(`${filled()}&move=${from}-${piece.dataset.piece}-${letter}`);
    });
  }

  async function copy(button) {
    const text = document.getElementById(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(text); // without the right to: the user's own keys copy it
    }
  }

  // -- a running job
  function live(now) {
    const connection = document.getElementById("connection");
    const title = document.title, first = now.querySelector("[data-state]");
    // So that a tab in the background tells it, too.
    const tell = (state) => { document.title = ({ hangs: "Hangs: ", died: "Died: " }[state] || "") + title; };
    if (first) tell(first.dataset.state);
    let shown = null;
    async function follow() {
      let every = 3; // seconds
      try {
        const answer = await fetch(now.dataset.now);
        if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
        const look = await answer.json();
        every = look.every;
        document.getElementById("to-capture").hidden = !look.captures;
        connection.textContent = "This page updates by itself.";
        if (look.html !== shown) { // a job that has ended stays as it is
          swap(now, shown = look.html);
          briefs();
          tell(look.state);
        }
      } catch {
        connection.textContent = "megaprof ui does not answer; the page tries again by itself.";
      }
      setTimeout(follow, 1000 * every);
    }
    follow();
  }

  briefs();
  const form = document.getElementById("what-if"), now = document.getElementById("now");
  if (form) whatIf(form);
  if (now) live(now);
})();
