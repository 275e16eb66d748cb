// Draw every figure, and let people choose the theme.

const DRAW = { chart, residency: residencyMap, timeline, occupancy };

function theme() {
  const button = document.getElementById("theme");
  const choices = [["", "as the system"], ["light", "light"], ["dark", "dark"]];
  let at = 0;
  button.addEventListener("click", () => {
    at = (at + 1) % choices.length;
    if (choices[at][0]) document.documentElement.dataset.theme = choices[at][0];
    else delete document.documentElement.dataset.theme;
    button.textContent = `Theme: ${choices[at][1]}`;
    redrawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
}

// One that cannot be drawn (a browser without DecompressionStream, say) says so; its numbers are in the tables.
async function drawFigure(figure) {
  const stage = figure.querySelector(".stage"), title = figure.querySelector("h3").textContent;
  try {
    await DRAW[figure.dataset.kind](stage, dataOf(`${figure.id}-data`), title, `${figure.id}-summary`);
  } catch (error) {
    console.error(error);
    stage.append(element("p", { class: "missing" }, `This browser cannot draw the figure (${error}); its numbers are in the tables.`));
  }
}

theme();
for (const figure of document.querySelectorAll("figure[data-kind]")) drawFigure(figure);

// Paper is white and cannot be clicked: canvases are painted anew in the light colours, short tables are unfolded; and
// back.
const LONGEST_PRINTED = 60; // rows
let onScreen = null;
addEventListener("beforeprint", () => {
  const folded = [...document.querySelectorAll("details:not([open])")].filter((d) => d.querySelectorAll("tbody tr").length <= LONGEST_PRINTED);
  onScreen = { theme: document.documentElement.dataset.theme, folded };
  for (const details of folded) details.open = true;
  document.documentElement.dataset.theme = "light";
  redrawAll();
});
addEventListener("afterprint", () => {
  for (const details of onScreen.folded) details.open = false;
  if (onScreen.theme) document.documentElement.dataset.theme = onScreen.theme;
  else delete document.documentElement.dataset.theme;
  redrawAll();
});
matchMedia("print").addEventListener("change", redrawAll);
