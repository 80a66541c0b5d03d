// Shows the values of all lines of a chart at the place on the x axis that is nearest to the pointer.
{
  const tip = document.createElement('div');
  tip.id = 'tip';
  tip.hidden = true;
  document.body.append(tip);
  const show = event => {
    const plot = event.target instanceof Element && event.target.closest('.plot');
    tip.hidden = !plot;
    if (!plot) return;
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(plot.getScreenCTM().inverse()).x;
    const lines = [...plot.querySelectorAll('[data-values]')].map(line => {
      const xs = line.getAttribute('d').match(/-?[\d.]+/g).filter((_, i) => i % 2 === 0).map(Number);
      const nearest = xs.reduce((best, x, i) => Math.abs(x - at) < Math.abs(xs[best] - at) ? i : best, 0);
      const [x, y] = line.dataset.values.split(';')[nearest].split('|');
      return `${line.dataset.name}: ${y} (${plot.dataset.x} ${x})`;
    });
    tip.textContent = lines.join('\n');
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${event.clientY + 18}px`;
  };
  addEventListener('pointermove', show);
  addEventListener('pointerdown', show);
}
