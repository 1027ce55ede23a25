package dnsproxy

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
	// time, before its nameservers are probed for a loop. Most have answered by then,
	// but no nameserver that forwards to us has: it waits for our answer, which another
	// nameserver gives after 50 ms at the earliest.
	suspectAfter = 40 * time.Millisecond

	// suspectForms is how many messages with one question may be relayed at a time
	// before the nameservers are probed at once: a forwarder in a loop may change the
	// message in each round (EDNS options, the case of letters), so that it is never the
	// same as one in flight. maxForms bounds those messages; further ones wait.
	suspectForms = 4
	maxForms     = 32
)

// A flightKey is what is asked of nameservers: a question, or a message that is
// relayed.
type flightKey struct {
	cache.Key // of a message that is relayed: the question's name, type and class
	// message is the digest of a message that is relayed, without its ID.
	message [sha256.Size]byte
	// over is what the client asked over, where nameservers are asked over the same.
	over transport
	// server is the one that is asked, where the client has chosen it.
	server netip.AddrPort
}

// relayKey returns the key of a message that is relayed as it came. Messages may be
// long, so the key has a digest.
func relayKey(packet []byte, name wire.Name, over transport, server netip.AddrPort) flightKey {
	const idLen = 2
	key := flightKey{
		Key:     cache.Key{Name: string(name)},
		message: sha256.Sum256(packet[idLen:]), over: over, server: server,
	}
	if end := wire.HeaderLen + len(name) + 1; len(packet) >= end+4 {
		key.Type, key.Class = binary.BigEndian.Uint16(packet[end:]), binary.BigEndian.Uint16(packet[end+2:])
	}
	return key
}

// An asked is what stays the same when a message comes back from a nameserver that
// forwards to us.
type asked struct {
	name         string
	qtype, class uint16
	server       netip.AddrPort
}

func (k *flightKey) asked() asked {
	return asked{name: k.Name, qtype: k.Type, class: k.Class, server: k.server}
}

// A flight is a question that nameservers are being asked, for all who ask it
// meanwhile.
type flight struct {
	key  flightKey
	done chan struct{} // closed when result is there
	// began is when the question was asked.
	began time.Time
	// result may be read once done is closed.
	result resolution

	forms   int // messages with the same question in flight when this one joined, with it
	suspect sync.Once
}

// suspectLater probes the nameservers of a flight for a loop if it is still in the air
// after suspectAfter. It is to be called when the flight's question comes in again.
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

// flights are the questions on their way. The zero value is ready for use.
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

// join returns the flight for a question. first says that there was none: the
// caller is to ask and to land it.
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
	key.Name = strings.Clone(key.Name) // it lives in the client's query
	joined = &flight{key: key, done: make(chan struct{}), began: time.Now(), forms: same.count + 1}
	f.byKey[key], f.forms[key.asked()] = joined, forms{count: same.count + 1, last: joined}
	return joined, true, nil
}

// land gives the result to all who joined.
func (f *flights) land(landed *flight, result resolution) {
	f.mu.Lock()
	if f.byKey[landed.key] == landed { // it is another after shut
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

// shut keeps clients from joining the flights under way, because the answers that those
// bring are out of date. They land as usual for the clients that have joined.
func (f *flights) shut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.byKey)
}
