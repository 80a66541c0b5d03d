//! The few places of connections whose other side is not known: before the handshake, at enrolment, on the status page.
//!
//! Silent connections must not keep others out. One address gets at most half of the places. A newcomer takes the place of a
//! connection of the address that has most, a silent one first.

use super::lock;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// An honest handshake takes no longer. Until then, a connection that has begun keeps its place against newcomers of its
/// own address: many nodes behind one address may connect at the same time.
const HANDSHAKE_TAKES: Duration = Duration::from_secs(1);

/// The same for a connection that has sent nothing yet: an honest one speaks with the packet that completes it.
const SILENCE_TAKES: Duration = Duration::from_millis(50);

/// The places.
#[derive(Debug)]
pub(crate) struct Strangers {
    n_max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// In order of arrival.
    all: Vec<Stranger>,
    /// Connections that have lost their place and are not closed yet.
    n_leaving: usize,
}

#[derive(Clone, Debug)]
struct Stranger {
    origin: IpAddr,
    since: Instant,
    is_silent: bool,
    leave: Arc<Notify>,
}

/// A stranger's place, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    strangers: Arc<Strangers>,
    leave: Arc<Notify>,
}

impl Strangers {
    pub fn new(n_max: usize) -> Self {
        Self { n_max, state: Mutex::default() }
    }

    /// A place for a connection from this address; `None` if others of this address have just begun to use them all.
    /// So it is while too many have yet to be closed.
    pub fn place(self: &Arc<Self>, address: IpAddr) -> Option<Place> {
        self.place_at(address, Instant::now())
    }

    fn place_at(self: &Arc<Self>, address: IpAddr, now: Instant) -> Option<Place> {
        let origin = origin(address);
        let mut state = lock(&self.state);
        let State { all, n_leaving } = &mut *state;
        let n_of = |all: &[Stranger], origin| all.iter().filter(|s| s.origin == origin).count();
        let crowded = if n_of(all, origin) >= (self.n_max / 2).max(1) {
            Some(origin)
        } else if all.len() >= self.n_max {
            // Of equal addresses the last one in this order; any rule that looks at the number will do.
            all.iter().map(|s| s.origin).max_by_key(|origin| n_of(all, *origin))
        } else {
            None
        };
        if let Some(crowded) = crowded {
            let silent = all.iter().position(|s| s.origin == crowded && s.is_silent);
            let oldest = silent.or_else(|| all.iter().position(|s| s.origin == crowded))?;
            let takes = if silent.is_some() { SILENCE_TAKES } else { HANDSHAKE_TAKES };
            let is_recent = crowded == origin && now.saturating_duration_since(all[oldest].since) < takes;
            if is_recent || *n_leaving >= self.n_max {
                return None;
            }
            all.remove(oldest).leave.notify_one();
            *n_leaving += 1;
        }
        let leave = Arc::new(Notify::new());
        all.push(Stranger { origin, since: now, is_silent: true, leave: Arc::clone(&leave) });
        Some(Place { strangers: Arc::clone(self), leave })
    }
}

impl Place {
    /// The connection has sent something.
    pub fn speaks(&self) {
        let mut state = lock(&self.strangers.state);
        if let Some(stranger) = state.all.iter_mut().find(|s| Arc::ptr_eq(&s.leave, &self.leave)) {
            stranger.is_silent = false;
        }
    }

    /// Ends when a newcomer has taken the place.
    pub async fn taken(&self) {
        self.leave.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = lock(&self.strangers.state);
        match state.all.iter().position(|s| Arc::ptr_eq(&s.leave, &self.leave)) {
            Some(at) => drop(state.all.remove(at)),
            None => state.n_leaving -= 1,
        }
    }
}

/// What one subscriber has: an IPv4 address, or a network of IPv6 addresses.
pub(crate) fn origin(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & (u128::MAX << 64))),
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(n: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, n])
    }

    #[test]
    fn silent_connections_of_one_address_do_not_keep_another_out() {
        let (strangers, start) = (Arc::new(Strangers::new(8)), Instant::now());
        let idle: Vec<_> = (0..100).filter_map(|_| strangers.place_at(address(1), start)).collect();
        assert_eq!(idle.len(), 4);
        let others: Vec<_> = (2..6).map(|n| strangers.place_at(address(n), start).unwrap()).collect();
        // All places are taken: the newcomer gets one of the crowd's at once, and no other address loses its own.
        let honest = strangers.place_at(address(9), start).unwrap();
        let taken = |place: &Place| !lock(&strangers.state).all.iter().any(|s| Arc::ptr_eq(&s.leave, &place.leave));
        assert_eq!(idle.iter().filter(|place| taken(place)).count(), 1);
        assert!(!others.iter().chain([&honest]).any(taken));
        // Even their own address gets in, once they have been silent for longer than honest ones are.
        let same = strangers.place_at(address(1), start + SILENCE_TAKES).unwrap();
        assert!(idle.iter().filter(|place| taken(place)).count() == 2 && !taken(&same));
        drop(same);
        drop((idle, others, honest));
        let state = lock(&strangers.state);
        assert_eq!((state.all.len(), state.n_leaving), (0, 0));
    }

    #[test]
    fn handshakes_that_have_begun_are_not_disturbed_by_their_own_address_unless_they_are_old() {
        let (strangers, start) = (Arc::new(Strangers::new(8)), Instant::now());
        let busy: Vec<_> = (0..4).map(|_| strangers.place_at(address(1), start).unwrap()).collect();
        busy.iter().for_each(Place::speaks);
        assert!(strangers.place_at(address(1), start + HANDSHAKE_TAKES / 2).is_none());
        assert!(strangers.place_at(address(1), start + HANDSHAKE_TAKES).is_some());
        drop(busy);
    }

    #[test]
    fn connections_that_are_not_closed_yet_still_count() {
        let (strangers, start) = (Arc::new(Strangers::new(8)), Instant::now());
        let late = |n| start + SILENCE_TAKES * n;
        let open: Vec<_> = (0..100).filter_map(|n| strangers.place_at(address(1), late(n))).collect();
        assert_eq!(open.len(), 4 + 8);
        drop(open);
        assert!(strangers.place_at(address(1), late(200)).is_some());
    }

    #[test]
    fn addresses_of_one_subscriber_count_as_one() {
        let same = |a: &str, b: &str| origin(a.parse().unwrap()) == origin(b.parse().unwrap());
        assert!(same("2001:db8::1", "2001:db8::ffff:1") && !same("2001:db8::1", "2001:db8:0:1::1"));
        assert!(same("10.0.0.1", "::ffff:10.0.0.1") && !same("10.0.0.1", "10.0.0.2"));
    }
}
