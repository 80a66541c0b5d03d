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

  // Every column of every table that has two rows or more: a click sorts it, another turns it round.
  const checkTables = () => {
    let n = 0;
    for (const table of document.querySelectorAll('table')) {
      const cells = column => [...table.tBodies[0].rows].map(row => row.cells[column].textContent);
      [...table.tHead.rows[0].cells].forEach((head, column) => {
        const before = cells(column), where = head.textContent;
        const number = text => { const v = parseFloat(text.replace('−', '-')); return isNaN(v) ? -Infinity : v; };
        const order = head.classList.contains('name') ? (a, b) => a.localeCompare(b) : (a, b) => number(a) === number(b) ? 0 : number(a) - number(b);
        const is_sorted = list => list.every((cell, i) => !i || order(list[i - 1], cell) <= 0);
        head.querySelector('button').click();
        const up = cells(column);
        if (!is_sorted(up) || head.getAttribute('aria-sort') !== 'ascending') complain('sort: not ascending:', where, up);
        head.querySelector('button').click();
        if (!is_sorted(cells(column).reverse())) complain('sort: not descending:', where, cells(column));
        if ([...up].sort().join() !== [...before].sort().join()) complain('sort: cells lost:', where);
        n += before.length > 1 ? 1 : 0;
      });
    }
    return n;
  };

  addEventListener('load', () => {
    const wide = document.documentElement.scrollWidth;
    if (wide > innerWidth) complain('overflow:', wide, 'in a window of', innerWidth);
    const least_contrast = checkText();
    document.querySelectorAll('details').forEach(details => details.open = true);
    if (document.documentElement.scrollWidth > innerWidth) complain('overflow: unfolded', document.documentElement.scrollWidth);
    const n_sorted = checkTables();
    for (const entry of performance.getEntriesByType('resource')) complain('request:', entry.name);
    const is_dark = matchMedia('(prefers-color-scheme: dark)').matches;
    parent.postMessage({ complaints, width: innerWidth, is_dark, least_contrast, n_sorted }, '*');
  });
})();
