package forward

import (
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

const (
	// suspectAfter is how long a question may be in flight, once it has come in a second
	// time, before its nameservers are probed for a loop. Most nameservers have answered
	// by then. One that forwards to this agent has not: it waits for the agent's answer,
	// which another nameserver gives after 50 ms at the earliest.
	suspectAfter = 40 * time.Millisecond

	// suspectForms is the number of relayed messages with one question in flight from which
	// on the nameservers are probed at once: a forwarder in a loop may change the message
	// in each round (EDNS options, the case of letters). maxForms bounds these messages;
	// further ones wait.
	suspectForms = 4
	maxForms     = 32
)

// A flightKey is what nameservers are asked: a question, or a message that is relayed.
type flightKey struct {
	cache.Key // of a relayed message: the question's name, type and class
	// message is the digest of a relayed message, without its ID. Messages may be long.
	message [sha256.Size]byte
	// how is the client's transport, where nameservers are asked over the same.
	how upstream.How
	// server is the nameserver that the message is relayed to, if the client chose it.
	server netip.AddrPort
}

// relayKey returns the key of a message that is relayed for q.
func relayKey(packet []byte, q *Query) flightKey {
	const idLen = 2
	key := flightKey{
		Key:     cache.Key{Name: string(q.Name)},
		message: sha256.Sum256(packet[idLen:]), how: q.How, server: q.Server,
	}
	if end := wire.HeaderLen + len(q.Name) + 1; len(packet) >= end+4 {
		key.Type, key.Class = binary.BigEndian.Uint16(packet[end:]), binary.BigEndian.Uint16(packet[end+2:])
	}
	return key
}

// An asked is what stays the same when a message comes back from a nameserver that
// forwards to this agent.
type asked struct {
	name         string
	qtype, class uint16
	server       netip.AddrPort
}

func (k *flightKey) asked() asked {
	return asked{name: k.Name, qtype: k.Type, class: k.Class, server: k.server}
}

// A flight is a question that nameservers are being asked, for all clients that ask it
// meanwhile.
type flight struct {
	key  flightKey
	done chan struct{} // closed when result is set
	// began is when the question was asked.
	began time.Time
	// result may be read once done is closed.
	result Result

	forms   int // messages with the same question in flight when this one joined, included
	suspect sync.Once
}

// suspectLater probes the nameservers of a flight for a loop if it has not landed after
// suspectAfter. It is called when the flight's question comes in again.
func (f *flight) suspectLater(group *upstream.Group) {
	f.suspect.Do(func() {
		time.AfterFunc(suspectAfter, func() {
			select {
			case <-f.done:
			default:
				group.Suspect()
			}
		})
	})
}

// flights are the questions in flight. The zero value is ready for use.
type flights struct {
	mu    sync.Mutex
	byKey map[flightKey]*flight
	forms map[asked]forms
}

// forms are the flights with one question.
type forms struct {
	count int
	last  *flight
}

// join returns the flight for a question. first says that there was none: the caller
// leads the flight, asks and lands it.
func (f *flights) join(key flightKey) (joined *flight, first bool) {
	joined, first, _ = f.joinWithin(key, 0)
	return joined, first
}

// joinWithin is like join if fewer than limit flights have the same question, or limit
// is 0. Otherwise joined is nil, and crowd is closed when one of them has landed.
func (f *flights) joinWithin(key flightKey, limit int) (joined *flight, first bool, crowd <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if joined, ok := f.byKey[key]; ok {
		return joined, false, nil
	}
	if f.byKey == nil {
		f.byKey, f.forms = map[flightKey]*flight{}, map[asked]forms{}
	}
	same := f.forms[key.asked()]
	if limit > 0 && same.count >= limit {
		return nil, false, same.last.done
	}
	key.Name = strings.Clone(key.Name) // it points into the client's query
	joined = &flight{key: key, done: make(chan struct{}), began: time.Now(), forms: same.count + 1}
	f.byKey[key], f.forms[key.asked()] = joined, forms{count: same.count + 1, last: joined}
	return joined, true, nil
}

// land gives the result to all clients that joined.
func (f *flights) land(landed *flight, result Result) {
	f.mu.Lock()
	if f.byKey[landed.key] == landed { // not after shut
		delete(f.byKey, landed.key)
	}
	if same := f.forms[landed.key.asked()]; same.count > 1 {
		same.count--
		f.forms[landed.key.asked()] = same
	} else {
		delete(f.forms, landed.key.asked())
	}
	f.mu.Unlock()
	landed.result = result
	close(landed.done)
}

// shut keeps clients from joining the flights under way, whose answers are out of date.
// They land as usual for the clients that have joined.
func (f *flights) shut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.byKey)
}
