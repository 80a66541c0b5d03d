// Sorts a table by the column whose head is clicked: as numbers where both cells start with one. Groups stay together.
document.querySelectorAll('th button').forEach(button => button.addEventListener('click', () => {
  const head = button.parentElement, table = head.closest('table'), column = head.cellIndex;
  const down = head.getAttribute('aria-sort') === 'ascending';
  head.parentElement.querySelectorAll('th').forEach(th => th.removeAttribute('aria-sort'));
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const text = row => row.cells[column].textContent;
  const rank = row => { const v = parseFloat(text(row).replace('−', '-')); return isNaN(v) ? -Infinity : v; };
  const named = head.classList.contains('name');
  const order = (a, b) => named ? text(a).localeCompare(text(b)) : (rank(a) === rank(b) ? 0 : rank(a) - rank(b));
  for (const body of table.tBodies) {
    const rows = [...body.rows].filter(row => !row.classList.contains('group'));
    rows.sort((a, b) => down ? order(b, a) : order(a, b)).forEach(row => body.append(row));
  }
}));
