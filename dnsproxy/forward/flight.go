package forward

import (
	"strings"
	"sync"
	"time"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/upstream"
)

// A flightKey identifies what nameservers are asked: a question, or a message that is relayed.
type flightKey struct {
	cache.Key // zero for a relayed message
	// relay distinguishes relayed messages. It consists of the client's transport, the nameserver if the client chose
	// it, and the message without its ID.
	relay string
}

// relayKey returns the key of a message that is relayed for q.
func relayKey(packet []byte, q *Query) flightKey {
	const idLen = 2
	relay := q.Server.AppendTo([]byte{byte(q.Mode)})
	return flightKey{relay: string(append(append(relay, 0), packet[idLen:]...))}
}

// A Client waits for the result of its query.
type Client interface {
	// Receive takes the result. Other clients may share the result, so it must not be changed. Receive is called
	// once. It must not block, because it may run on the goroutine that reads a nameserver's socket.
	Receive(result *Result)
}

// A seat is the place of one client in a flight.
type seat struct {
	client     Client  // nil if no client waits
	staleReply *Result // a reply from the cache, for when nameservers fail or are slow; nil if there is none
	otherwise  bool    // Query.Otherwise
}

// give passes a result to the clients of seats. If the result is a failure, a client whose seat has a stale reply gets
// the stale reply instead.
func give(result *Result, seats ...seat) {
	for _, s := range seats {
		switch {
		case s.client == nil:
		case s.staleReply != nil && !result.usable():
			stale := *s.staleReply
			stale.failure, stale.call = result.Failure(), result.call
			s.client.Receive(&stale)
		default:
			s.client.Receive(result)
		}
	}
}

// A flight is a question, or a relayed message, on its way to nameservers and back. All clients that send the same
// question or message in this time take a seat in the flight, and get the same answer. The flight lands when the
// answer has come.
type flight struct {
	forwarder *Forwarder
	key       flightKey
	began     time.Time
	// These two are set before nameservers are asked. relays is true if the flight relays its message. generation is the
	// cache's generation before the nameservers were chosen.
	relays     bool
	generation uint64

	// Guarded by the mutex of the flights.
	seats        []seat
	room         [1]seat // memory for the first seat
	landed       bool    // it has ended, perhaps because it was evicted
	call         upstream.Call
	older, newer *flight // the flights that began before and after it
}

// flights are all flights, and the places that clients take in them. Each client takes one place. A flight that began
// without a client takes a place, too, and so does each successful call of the method take.
//
// If no place is free, the oldest flight is evicted. Most nameservers answer within milliseconds, so the oldest
// flight is one whose nameservers do not answer. In this way, names with dead nameservers never keep other names from
// being asked.
type flights struct {
	forwarder *Forwarder // its Config.MaxInflight is how many places there are

	mu    sync.Mutex
	used  int // how many places are taken
	byKey map[flightKey]*flight
	ends  flight // sentinel of the list of flights: ends.newer is the oldest flight, ends.older the newest
}

// take takes a place for a query that has no flight. If it reports true, the caller must call the method release. If it
// reports false, no place was free, and the query counts as refused.
func (f *flights) take() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.used >= f.forwarder.config.MaxInflight {
		f.forwarder.metrics.overflow(1)
		return false
	}
	f.used++
	return true
}

// release returns a place.
func (f *flights) release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.used--
}

// count returns how many places are taken.
func (f *flights) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.used
}

// join seats a client in the flight for a key, and begins the flight if there is none. first is true if it has begun it:
// the caller must ask nameservers, or the cache again. If no place is free and evict is true, the oldest other flight
// ends and makes room. If joined is nil, there is no place, and the client gets its stale reply, or an error.
func (f *flights) join(key flightKey, s seat, evict bool) (joined *flight, first bool) {
	f.mu.Lock()
	joined = f.byKey[key]
	if joined != nil && s.client == nil {
		f.mu.Unlock()
		return joined, false
	}
	var call upstream.Call
	var victims []seat
	places := f.forwarder.config.MaxInflight
	if oldest := f.ends.newer; f.used >= places && evict {
		if oldest == joined {
			oldest = oldest.newer
		}
		if oldest != &f.ends {
			victims, call = f.endLocked(oldest), oldest.call
		}
	}
	if f.used < places {
		if first = joined == nil; first {
			key.Name = strings.Clone(key.Name) // the string is in the memory of the client's query
			joined = &flight{forwarder: f.forwarder, key: key, began: time.Now(), older: f.ends.older, newer: &f.ends}
			joined.older.newer, f.ends.older = joined, joined
			f.byKey[key], joined.seats = joined, joined.room[:0]
		}
		f.used++
		joined.seats = append(joined.seats, s)
	} else if joined = nil; s.client != nil {
		victims = append(victims, s)
	}
	f.mu.Unlock()
	call.Cancel()
	f.forwarder.metrics.overflow(len(victims))
	give(&Result{Err: ErrTooMany, Source: SourceSelf}, victims...)
	return joined, first
}

// endLocked removes a flight and returns its seats.
func (f *flights) endLocked(l *flight) []seat {
	l.landed = true
	l.older.newer, l.newer.older = l.newer, l.older
	if f.byKey[l.key] == l { // false if shut has removed it already
		delete(f.byKey, l.key)
	}
	seats := l.seats
	f.used -= len(seats)
	l.seats = nil
	return seats
}

// setCall records the call by which nameservers are asked for a flight. If the flight has been evicted meanwhile, the call
// is cancelled.
func (f *flights) setCall(l *flight, call upstream.Call) {
	f.mu.Lock()
	l.call = call
	landed := l.landed
	f.mu.Unlock()
	if landed {
		call.Cancel()
	}
}

// land ends a flight, and gives the result to all its clients.
func (f *flights) land(l *flight, result *Result) {
	f.mu.Lock()
	var seats []seat
	if !l.landed {
		seats = f.endLocked(l)
	}
	f.mu.Unlock()
	give(result, seats...)
}

// giveStale gives a stale reply to each client of a flight whose seat has one.
func (f *flights) giveStale(l *flight) {
	f.mu.Lock()
	var left, given []seat
	for _, s := range l.seats {
		if s.staleReply == nil && !s.otherwise {
			left = append(left, s)
			continue
		}
		given = append(given, s)
		left = append(left, seat{}) // the flight keeps its place
	}
	l.seats = left
	call := l.call
	f.mu.Unlock()
	give(&Result{Err: errLate, call: call}, given...)
}

// shut keeps clients from joining the flights that have begun, because the answers of these flights may be out of
// date. The flights land as usual for the clients that have joined.
func (f *flights) shut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.byKey)
}
