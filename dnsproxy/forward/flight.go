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
	// suspectAfter is how long a question may stay in flight, after it has come in for the
	// second time, before its nameservers are probed for a loop. Most nameservers have
	// answered by then. A nameserver that forwards to this agent has not: it waits for the
	// agent, which queries another nameserver after 50 ms at the earliest.
	suspectAfter = 40 * time.Millisecond

	// suspectForms is a number of relayed messages in flight. When so many have the same question, the nameservers are
	// probed at once: a forwarder in a loop may change the message in each round (EDNS options, the case of letters).
	suspectForms = 4
)

// A flightKey identifies what nameservers are asked: a question, or a message that is relayed.
type flightKey struct {
	cache.Key // of a relayed message: the question's name, type and class
	// relay distinguishes relayed messages by their digest (messages may be long), the client's transport, and the
	// nameserver if the client chose it. For a question, it is empty or, if there is no cache, the client's transport.
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
	// Receive takes the result, which other clients share. It is called once, perhaps on the goroutine that
	// reads a nameserver's socket, so it must not block.
	Receive(result *Result)
}

// A seat is the place of one client in a flight.
type seat struct {
	client Client  // nil if no client waits
	old    *Result // a reply from the cache, for when nameservers fail or are slow; nil if there is none
}

// give gives a result to the client of a seat, or the old reply if nameservers have failed.
func (s seat) give(result *Result) {
	switch {
	case s.client == nil:
	case s.old != nil && !result.usable():
		s.client.Receive(s.old.because(result))
	default:
		s.client.Receive(result)
	}
}

// A flight is a question that was sent to nameservers, for all clients that ask it meanwhile. It is the
// receiver of the nameservers' answer.
type flight struct {
	all   *flights
	key   flightKey
	began time.Time
	// generation is the cache's generation from before nameservers were chosen. traced is true if the first client wants
	// all of Result.Attempts. Both are set before nameservers are asked.
	generation uint64
	traced     bool

	// Guarded by the mutex of the flights.
	seats        []seat
	room         [1]seat // memory for the first seat
	landed       bool
	evicted      bool // without an answer
	suspected    bool // suspectLater was called
	started      upstream.Started
	older, newer *flight // in the order in which they began
}

// Receive takes the nameservers' answer.
func (l *flight) Receive(answer upstream.Answer, err error) { l.all.receive(l, answer, err) }

// withTrace returns how, and adds upstream.Traced if the flight is traced.
func (l *flight) withTrace(how upstream.How) upstream.How {
	if l.traced {
		return how | upstream.Traced
	}
	return how
}

// relays reports whether the flight relays its message.
func (l *flight) relays() bool { return len(l.key.relay) > sha256.Size }

// A boarding is the result of join.
type boarding struct {
	flight *flight // nil if there is no place
	first  bool    // the flight is new: the caller leads it
	forms  int     // relayed messages in flight with the same question
	evicted
}

// An evicted has what remains of a flight that has made room.
type evicted struct {
	seats   []seat
	started upstream.Started
}

// end cancels the queries of an evicted flight and gives its clients an error, or their old replies.
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

// flights are the questions in flight, with the places that clients take in them. A client takes one place; so
// does a flight that began without a client, and each successful call of take. If no place is free, the oldest
// flight makes room: most nameservers answer within milliseconds, so the oldest question is one that nameservers
// leave unanswered. So names with dead nameservers never keep other names from being asked.
type flights struct {
	places  int                                                       // how many there are; never changes
	receive func(answered *flight, answer upstream.Answer, err error) // takes the nameservers' answer; never changes

	mu    sync.Mutex
	taken int
	byKey map[flightKey]*flight
	forms map[cache.Key]int // numbers of relayed messages in flight, by their question
	ends  flight            // of the list of flights: ends.newer is the oldest flight, ends.older the newest
}

func newFlights(places int, receive func(answered *flight, answer upstream.Answer, err error)) *flights {
	f := &flights{places: places, receive: receive, byKey: map[flightKey]*flight{}, forms: map[cache.Key]int{}}
	f.ends.older, f.ends.newer = &f.ends, &f.ends
	return f
}

// take takes a place outside of all flights, and reports whether one was free. If so, the caller must call release.
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

// join seats a client in the flight for a key. If no place is free and evict is true, it evicts the oldest other
// flight, which the caller must end.
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
	key.Name = strings.Clone(key.Name) // it points into the client's query
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

// lead notes the queries of a flight, to cancel them if the flight is evicted.
func (f *flights) lead(led *flight, started upstream.Started) {
	f.mu.Lock()
	led.started = started
	evicted := led.evicted // since the flight began
	f.mu.Unlock()
	if evicted {
		started.Cancel()
	}
}

// land gives the result to all clients that joined.
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

// suspectLater probes the nameservers of a flight for a loop if it has not landed after
// suspectAfter. It is called when the flight's question comes in again.
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

// shut keeps clients from joining the flights that have begun, whose answers are out of date.
// These flights land as usual for the clients that have joined.
func (f *flights) shut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.byKey)
}
