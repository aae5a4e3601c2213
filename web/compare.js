// On the ToMACompare node: both images one over the other, with a bar to wipe between them, beside their difference; and
// the node's sentence.
import { addSnug, chain, make, onOutput } from "./dom.js";
import { fileUrl } from "./files.js";
import { say } from "./text.js";

const EMPTY_HEIGHT = 84;

export function addWipe(node) {
  const view = buildView();
  view.fit = addSnug(node, "summary", view.root, view.inner, EMPTY_HEIGHT);
  chain(node, "onResize", () => requestAnimationFrame(view.fit));
  onOutput(node, "toma_summary", (sentence) => (view.sentence.textContent = sentence ?? ""));
  onOutput(node, "toma_wipe", view.load);
  // What ComfyUI would show of the node's images is all in the view: in Vue nodes, and in classic ones.
  node.hideOutputImages = true;
  node.onDrawBackground = () => {};
}

function buildView() {
  const image = () => make("img", { alt: "", draggable: false });
  const name = (key) => make("span", { className: `toma-name toma-${key}` });
  const under = image(), over = image(), apart = image();
  const names = ["reference", "image", "difference"].map(name);
  const bar = make("div", { className: "toma-wipe-bar" });
  const wipe = make("div", { className: "toma-wipe-box toma-wiped" }, under, over, bar, names[0], names[1]);
  const difference = make("div", { className: "toma-wipe-box" }, apart, names[2]);
  const message = make("div", { className: "toma-message", textContent: say("noWipe") });
  const pair = make("div", { className: "toma-pair" }, message, wipe, difference);
  const slider = make("input", { type: "range", min: 0, max: 100, step: 1, value: 50, className: "toma-wipe" });
  const numbers = make("input", { type: "range", min: 0, max: 0, step: 1, value: 0, className: "toma-frames" });
  const which = make("span", { className: "toma-which" });
  const batch = make("label", { className: "toma-batch" }, which, numbers);
  const sentence = make("div", { className: "toma-sentence" });
  const controls = make("div", { className: "toma-controls" }, slider, batch);
  const inner = make("div", { className: "toma-inner" }, pair, controls, sentence);
  const root = make("div", { className: "toma toma-compare" }, inner);
  let files = null;
  wipe.hidden = difference.hidden = controls.hidden = true;

  const place = (percent) => {
    const at = Math.min(Math.max(percent, 0), 100);
    slider.value = at;
    // The reference lies on the left of the bar, the image on its right.
    over.style.clipPath = `inset(0 0 0 ${at}%)`;
    bar.style.left = `${at}%`;
  };
  const follow = (event) => {
    const inside = wipe.getBoundingClientRect();
    place((100 * (event.clientX - inside.left)) / inside.width);
  };
  wipe.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    wipe.setPointerCapture(event.pointerId);
    follow(event);
    slider.focus({ preventScroll: true });
    event.preventDefault(); // no selection, no dragging of the image
  });
  wipe.addEventListener("pointermove", (event) => wipe.hasPointerCapture(event.pointerId) && follow(event));
  slider.addEventListener("input", () => place(Number(slider.value)));

  // The boxes have the shape of the images, and small images keep their pixels.
  under.addEventListener("load", () => {
    for (const box of [wipe, difference]) {
      box.style.aspectRatio = `${under.naturalWidth} / ${under.naturalHeight}`;
      box.classList.toggle("toma-pixels", under.naturalWidth < 200);
    }
  });

  const show = () => {
    const at = Math.min(Number(numbers.value), files.reference.length - 1);
    under.src = fileUrl(files.reference[at]);
    over.src = fileUrl(files.image[at]);
    apart.src = fileUrl(files.difference?.[at] ?? {});
    which.textContent = say("frame", { f: Number(files.numbers?.[at] ?? at) + 1 });
    batch.hidden = files.reference.length < 2;
    const largest = Number(Number(files.most ?? 0).toPrecision(2));
    [say("reference"), say("image"), say("difference", { x: largest })].forEach((text, i) => (names[i].textContent = text));
    slider.setAttribute("aria-label", say("wipe"));
    numbers.setAttribute("aria-label", say("imageLabel"));
  };
  numbers.addEventListener("input", show);
  place(50);

  return {
    root,
    inner,
    sentence,
    load(output) {
      if (!output?.reference?.length || !output.image?.length) return;
      files = output;
      message.hidden = true;
      wipe.hidden = difference.hidden = controls.hidden = false;
      numbers.max = files.reference.length - 1;
      show();
    },
  };
}
