package forward

import (
	"crypto/sha256"
	"encoding/binary"
	"strings"
	"sync"
	"time"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

const (
	// suspectAfter is how long the agent waits, after a question has come in for the second time, before it probes
	// the nameservers for a loop. Most nameservers have answered by then. A nameserver that forwards to this agent
	// has not answered: it waits for the agent, which queries another nameserver after 50 ms at the earliest.
	suspectAfter = 40 * time.Millisecond

	// suspectForms is how many different messages with the same question must be in flight before the nameservers are
	// probed at once. A forwarder in a loop may change the message in each round, for example the case of letters.
	suspectForms = 4
)

// A flightKey identifies what nameservers are asked: a question, or a message that is relayed.
type flightKey struct {
	cache.Key // of a relayed message, only the name, type and class of the question
	// relay distinguishes relayed messages. It consists of the digest of the message, the client's transport and, if
	// the client chose the nameserver, the nameserver. For a question that is not relayed, it is empty. But if the
	// cache is off, it is the client's transport.
	relay string
}

// relayKey returns the key of a message that is relayed for q.
func relayKey(packet []byte, q *Query) flightKey {
	const idLen = 2
	digest := sha256.Sum256(packet[idLen:])
	relay := append(digest[:], byte(q.How))
	if q.Server.IsValid() {
		relay = append(relay, q.Server.String()...)
	}
	key := flightKey{Key: cache.Key{Name: string(q.Name)}, relay: string(relay)}
	if end := wire.HeaderLen + len(q.Name) + 1; len(packet) >= end+4 {
		key.Type, key.Class = binary.BigEndian.Uint16(packet[end:]), binary.BigEndian.Uint16(packet[end+2:])
	}
	return key
}

// A Client waits for the result of its query.
type Client interface {
	// Receive takes the result. Other clients may share the result, so it must not be changed. Receive is called
	// once. It must not block, because it may run on the goroutine that reads a nameserver's socket.
	Receive(result *Result)
}

// A seat is the place of one client in a flight.
type seat struct {
	client Client  // nil if no client waits
	old    *Result // a reply from the cache, for when nameservers fail or are slow; nil if there is none
}

// give passes a result to the client of a seat. If the result is a failure, and the seat has an old reply, the client
// gets the old reply instead.
func (s seat) give(result *Result) {
	switch {
	case s.client == nil:
	case s.old != nil && !result.usable():
		s.client.Receive(s.old.because(result))
	default:
		s.client.Receive(result)
	}
}

// A flight is a question, or a relayed message, on its way to nameservers and back. All clients that send the same
// question or message in this time take a seat in the flight, and get the same answer. The flight lands when the
// answer has come.
type flight struct {
	all   *flights
	key   flightKey
	began time.Time
	// generation is the cache's generation before the nameservers were chosen. traced is true if the first client
	// has set Query.Trace. Both are set before nameservers are asked.
	generation uint64
	traced     bool

	// Guarded by the mutex of the flights.
	seats        []seat
	room         [1]seat // memory for the first seat
	landed       bool    // it has ended, perhaps because it was evicted
	evicted      bool    // it has ended without an answer, to make room
	suspected    bool    // suspectLater was called
	started      upstream.Started
	older, newer *flight // the flights that began before and after it
}

// Receive implements [upstream.Receiver].
func (l *flight) Receive(answer upstream.Answer, err error) { l.all.receive(l, answer, err) }

// withTrace returns how with upstream.Traced if the flight is traced, otherwise how itself.
func (l *flight) withTrace(how upstream.How) upstream.How {
	if l.traced {
		return how | upstream.Traced
	}
	return how
}

// relays reports whether the flight relays its message.
func (l *flight) relays() bool { return len(l.key.relay) > sha256.Size }

// A boarding is the result of the method join.
type boarding struct {
	flight *flight // nil if there is no place
	first  bool    // the flight is new: the caller leads it
	forms  int     // how many relayed messages with the same question are in flight
	evicted
}

// An evicted is what remains of a flight that was evicted to make room.
type evicted struct {
	seats   []seat
	started upstream.Started
}

// end cancels the queries of an evicted flight. It gives its clients an error, or their old replies.
// It returns how many places the flight had.
func (e evicted) end() (clients int) {
	if e.seats == nil {
		return 0
	}
	e.started.Cancel()
	result := &Result{Err: ErrTooMany, Source: SourceSelf}
	for _, s := range e.seats {
		s.give(result)
	}
	return len(e.seats)
}

// flights are all flights, and the places that clients take in them. Each client takes one place. A flight that began
// without a client takes a place, too, and so does each successful call of the method take.
//
// If no place is free, the oldest flight is evicted. Most nameservers answer within milliseconds, so the oldest
// flight is one whose nameservers do not answer. So names with dead nameservers never keep other names from being
// asked.
type flights struct {
	places  int                                                       // how many there are; never changes
	receive func(answered *flight, answer upstream.Answer, err error) // called with an answer; never changes

	mu    sync.Mutex
	taken int // how many places are taken
	byKey map[flightKey]*flight
	forms map[cache.Key]int // how many relayed messages are in flight, by their question
	ends  flight            // sentinel of the list of flights: ends.newer is the oldest flight, ends.older the newest
}

func newFlights(places int, receive func(answered *flight, answer upstream.Answer, err error)) *flights {
	f := &flights{places: places, receive: receive, byKey: map[flightKey]*flight{}, forms: map[cache.Key]int{}}
	f.ends.older, f.ends.newer = &f.ends, &f.ends
	return f
}

// take takes a place for a query that has no flight. It reports whether a place was free. If it reports true, the
// caller must call the method release.
func (f *flights) take() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.taken >= f.places {
		return false
	}
	f.taken++
	return true
}

// release returns a place.
func (f *flights) release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.taken--
}

// count returns how many places are taken.
func (f *flights) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.taken
}

// join seats a client in the flight for a key. If there is no such flight, it begins one. If no place is free and
// evict is true, it evicts the oldest other flight. The caller must call the method end of the result.
func (f *flights) join(key flightKey, who seat, evict bool) (b boarding) {
	f.mu.Lock()
	defer f.mu.Unlock()
	joined := f.byKey[key]
	if joined != nil && who.client == nil {
		return boarding{flight: joined}
	}
	if f.taken >= f.places {
		if !evict {
			return b
		}
		b.evicted = f.evictLocked(joined)
		if f.taken >= f.places {
			return b
		}
	}
	f.taken++
	if b.flight = joined; joined == nil {
		b.flight, b.first = f.beginLocked(key), true
	}
	b.flight.seats = append(b.flight.seats, who)
	b.forms = f.forms[key.Key]
	return b
}

func (f *flights) beginLocked(key flightKey) *flight {
	key.Name = strings.Clone(key.Name) // the string is in the memory of the client's query
	begun := &flight{all: f, key: key, began: time.Now(), older: f.ends.older, newer: &f.ends}
	begun.seats = begun.room[:0]
	begun.older.newer, f.ends.older = begun, begun
	f.byKey[key] = begun
	if begun.relays() {
		f.forms[key.Key]++
	}
	return begun
}

// evictLocked removes the oldest flight other than except.
func (f *flights) evictLocked(except *flight) (e evicted) {
	victim := f.ends.newer
	if victim == except {
		victim = victim.newer
	}
	if victim != &f.ends {
		victim.evicted = true
		e.seats, e.started = f.endLocked(victim), victim.started
	}
	return e
}

// endLocked removes a flight and returns its seats.
func (f *flights) endLocked(ended *flight) []seat {
	ended.landed = true
	ended.older.newer, ended.newer.older = ended.newer, ended.older
	if f.byKey[ended.key] == ended { // false after shut
		delete(f.byKey, ended.key)
	}
	if ended.relays() {
		if f.forms[ended.key.Key]--; f.forms[ended.key.Key] == 0 {
			delete(f.forms, ended.key.Key)
		}
	}
	seats := ended.seats
	f.taken -= len(seats)
	ended.seats = nil
	return seats
}

// lead notes the queries of a flight that were started, so that they can be cancelled if the flight is evicted.
func (f *flights) lead(led *flight, started upstream.Started) {
	f.mu.Lock()
	led.started = started
	evicted := led.evicted // it may have been evicted already
	f.mu.Unlock()
	if evicted {
		started.Cancel()
	}
}

// land ends a flight, and gives the result to all its clients.
func (f *flights) land(landed *flight, result *Result) {
	f.mu.Lock()
	if landed.landed {
		f.mu.Unlock()
		return
	}
	seats := f.endLocked(landed)
	f.mu.Unlock()
	for _, s := range seats {
		s.give(result)
	}
}

// giveOld gives the clients of a flight their old replies, if they have one.
func (f *flights) giveOld(late *flight) {
	f.mu.Lock()
	var left, given []seat
	for _, s := range late.seats {
		if s.old == nil {
			left = append(left, s)
			continue
		}
		given = append(given, s)
		left = append(left, seat{}) // the flight keeps its place
	}
	late.seats = left
	started := late.started
	f.mu.Unlock()
	for _, s := range given {
		s.give(&Result{Err: errLate, Attempts: started.Attempts()})
	}
}

// suspectLater is called when the question of a flight comes in again. If the flight has not landed after
// suspectAfter, its nameservers are probed for a loop.
func (f *flights) suspectLater(joined *flight, group *upstream.Group) {
	f.mu.Lock()
	first := !joined.suspected
	joined.suspected = true
	f.mu.Unlock()
	if !first {
		return
	}
	time.AfterFunc(suspectAfter, func() {
		f.mu.Lock()
		landed := joined.landed
		f.mu.Unlock()
		if !landed {
			group.Suspect()
		}
	})
}

// shut keeps clients from joining the flights that have begun, because the answers of these flights may be out of
// date. The flights land as usual for the clients that have joined.
func (f *flights) shut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.byKey)
}
