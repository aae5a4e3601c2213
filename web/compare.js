// On the ToMACompare node: both images, one over the other, with a bar to wipe between them; and its sentence.
import { addElement, make, onOutput } from "./dom.js";
import { fileUrl } from "./files.js";
import { say } from "./text.js";

const LEAST_HEIGHT = 240;

export function addWipe(node) {
  const view = buildView();
  addElement(node, "summary", view.root, () => LEAST_HEIGHT);
  onOutput(node, "toma_summary", (sentence) => (view.sentence.textContent = sentence ?? ""));
  onOutput(node, "toma_wipe", view.load);
}

function buildView() {
  const under = make("img", { alt: "", draggable: false }), over = make("img", { alt: "", draggable: false });
  const bar = make("div", { className: "toma-wipe-bar" });
  const names = ["reference", "image"].map((name) => make("span", { className: `toma-name toma-${name}` }));
  const box = make("div", { className: "toma-wipe-box" }, under, over, bar, ...names);
  const message = make("div", { className: "toma-message", textContent: say("noWipe") });
  const stage = make("div", { className: "toma-stage" }, message, box);
  const slider = make("input", { type: "range", min: 0, max: 100, step: 1, value: 50 });
  const numbers = make("input", { type: "range", min: 0, max: 0, step: 1, value: 0 });
  const which = make("span", { className: "toma-which" });
  const batch = make("label", { className: "toma-batch" }, which, numbers);
  const sentence = make("div", { className: "toma-sentence" });
  const controls = make("div", { className: "toma-controls" }, slider, batch);
  const root = make("div", { className: "toma toma-compare" }, stage, controls, sentence);
  let files = null;
  box.hidden = controls.hidden = true;

  const place = (percent) => {
    const at = Math.min(Math.max(percent, 0), 100);
    slider.value = at;
    // The reference lies on the left of the bar, the image on its right.
    over.style.clipPath = `inset(0 0 0 ${at}%)`;
    bar.style.left = `${at}%`;
  };
  const follow = (event) => {
    const inside = box.getBoundingClientRect();
    place((100 * (event.clientX - inside.left)) / inside.width);
  };
  stage.addEventListener("pointerdown", (event) => {
    if (event.button || !files) return;
    stage.setPointerCapture(event.pointerId);
    follow(event);
    slider.focus({ preventScroll: true });
    event.preventDefault(); // no selection, no dragging of the image
  });
  stage.addEventListener("pointermove", (event) => stage.hasPointerCapture(event.pointerId) && follow(event));
  slider.addEventListener("input", () => place(Number(slider.value)));

  // The images keep their shape inside of the stage, so that the bar runs over them and nothing else.
  const fit = () => {
    const { naturalWidth: width, naturalHeight: height } = under;
    if (!width || !stage.clientWidth) return;
    const scale = Math.min(stage.clientWidth / width, stage.clientHeight / height);
    box.style.width = `${width * scale}px`;
    box.style.height = `${height * scale}px`;
  };
  new ResizeObserver(fit).observe(stage);
  under.addEventListener("load", fit);

  const show = () => {
    const at = Math.min(Number(numbers.value), files.reference.length - 1);
    under.src = fileUrl(files.reference[at]);
    over.src = fileUrl(files.image[at]);
    which.textContent = `${(files.numbers?.[at] ?? at) + 1}`;
    batch.hidden = files.reference.length < 2;
    names.forEach((name, i) => (name.textContent = say(["reference", "image"][i])));
    slider.setAttribute("aria-label", say("wipe"));
    numbers.setAttribute("aria-label", say("imageLabel"));
  };
  numbers.addEventListener("input", show);
  place(50);

  return {
    root,
    sentence,
    load(output) {
      if (!output?.reference?.length || !output.image?.length) return;
      files = output;
      message.hidden = true;
      box.hidden = controls.hidden = false;
      numbers.max = files.reference.length - 1;
      show();
    },
  };
}
