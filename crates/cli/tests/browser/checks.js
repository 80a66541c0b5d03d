// Goes into the head of a copy of a page, before anything else. Looks at the page once it is loaded, and tells the window
// around it what it found, as a list of complaints.
(() => {
  const complaints = [];
  const complain = (...text) => complaints.push(text.join(' '));
  addEventListener('error', event => complain('error:', event.message || event.target), true);
  addEventListener('securitypolicyviolation', event => complain('request:', event.blockedURI));
  console.error = (...text) => complain('console:', ...text);

  const channels = colour => (colour.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const luminance = colour => {
    const [r, g, b] = channels(colour).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const isClear = colour => channels(colour).length > 3 && channels(colour)[3] === 0;
  const behind = element => {
    const svg = element.closest('svg');
    if (svg) return getComputedStyle(svg.querySelector('.paper')).fill;
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (!isClear(colour)) return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  const checkText = () => {
    let least = Infinity;
    for (const element of document.body.querySelectorAll('*')) {
      const text = [...element.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join('');
      if (!text || element.closest('script, title')) continue;
      const style = getComputedStyle(element);
      const ratio = contrast(element.closest('svg') ? style.fill : style.color, behind(element));
      least = Math.min(least, ratio);
      if (ratio < 4.5) complain('contrast:', ratio.toFixed(2), element.tagName, text.slice(0, 40));
    }
    return least;
  };

  // Every column of every table that has two rows or more: a click sorts it, another turns it round. Groups stay apart.
  const checkTables = () => {
    let n = 0;
    for (const table of document.querySelectorAll('table:has(th button)')) {
      const rows = body => [...body.rows].filter(row => !row.classList.contains('group'));
      const cells = column => [...table.tBodies].map(body => rows(body).map(row => row.cells[column].textContent));
      [...table.tHead.rows[0].cells].forEach((head, column) => {
        const before = cells(column), where = head.textContent;
        const number = text => { const v = parseFloat(text.replace('−', '-')); return isNaN(v) ? -Infinity : v; };
        const order = head.classList.contains('name') ? (a, b) => a.localeCompare(b) : (a, b) => number(a) === number(b) ? 0 : number(a) - number(b);
        const isSorted = list => list.every((cell, i) => !i || order(list[i - 1], cell) <= 0);
        head.querySelector('button').click();
        const up = cells(column);
        if (!up.every(isSorted) || head.getAttribute('aria-sort') !== 'ascending') complain('sort: not ascending:', where, up);
        head.querySelector('button').click();
        if (!cells(column).every(list => isSorted(list.reverse()))) complain('sort: not descending:', where, cells(column));
        const all = groups => groups.map(list => [...list].sort().join()).join(';');
        if (all(up) !== all(before)) complain('sort: cells lost or moved to another group:', where);
        n += before.flat().length > 1 ? 1 : 0;
      });
    }
    return n;
  };

  // Every chart shows its values below the pointer; charts that a phone does not show have no place.
  const checkHover = () => {
    let n = 0;
    for (const plot of document.querySelectorAll('.plot')) {
      const box = plot.getBoundingClientRect();
      if (!box.width) continue;
      const at = { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, bubbles: true };
      plot.querySelector('rect').dispatchEvent(new PointerEvent('pointermove', at));
      const tip = document.getElementById('tip'), n_lines = plot.querySelectorAll('[data-values]').length;
      const lines = tip.textContent.split('\n').filter(line => /: −?-?[\d.]+( ± [\d.]+)? \(.+ [\d.]+\)$/.test(line));
      if (tip.hidden || lines.length !== n_lines) complain('hover:', tip.textContent, 'for', n_lines, 'lines');
      const right = tip.getBoundingClientRect().right;
      if (right > innerWidth + 1) complain('hover: beyond the edge', right);
      n += 1;
    }
    document.body.dispatchEvent(new PointerEvent('pointermove', { bubbles: true }));
    if (n && !document.getElementById('tip').hidden) complain('hover: the values stay');
    return n;
  };

  addEventListener('load', () => {
    const wide = document.documentElement.scrollWidth;
    if (wide > innerWidth) complain('overflow:', wide, 'in a window of', innerWidth);
    const least_contrast = checkText();
    document.querySelectorAll('details').forEach(details => details.open = true);
    if (document.documentElement.scrollWidth > innerWidth) complain('overflow: unfolded', document.documentElement.scrollWidth);
    const n_sorted = checkTables(), n_hovered = checkHover();
    // On a phone no chart is wider than its box.
    for (const svg of document.querySelectorAll('.narrow svg')) {
      if (svg.getBoundingClientRect().width > svg.parentElement.clientWidth + 1) complain('chart: wider than its box');
    }
    for (const entry of performance.getEntriesByType('resource')) complain('request:', entry.name);
    const is_dark = matchMedia('(prefers-color-scheme: dark)').matches;
    parent.postMessage({ complaints, width: innerWidth, is_dark, least_contrast, n_sorted, n_hovered }, '*');
  });
})();
