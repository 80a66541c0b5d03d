// Replaces the parts of the page that have changed. The browser connects anew by itself.
{
  const events = new EventSource('events');
  const offline = is => document.body.classList.toggle('offline', is);
  events.onopen = () => offline(false);
  events.onerror = () => offline(true);
  events.onmessage = event => {
    for (const [id, html] of Object.entries(JSON.parse(event.data))) document.getElementById(id).innerHTML = html;
    document.title = document.querySelector('.now').textContent + ' – fedproj';
  };
  // The run is over, and the page shows its end.
  events.addEventListener('end', () => { events.close(); offline(false); });
}
