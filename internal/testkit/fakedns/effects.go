package fakedns

import (
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// A Request is a received query.
type Request struct {
	Msg  *dns.Msg
	Wire []byte // as received, without the length prefix of TCP
	// Network is "udp", "tcp" or "tls".
	Network string
}

// newRequest parses a query. It returns false if b is no message of DNS.
func newRequest(b []byte, network string) (Request, bool) {
	r := Request{Msg: new(dns.Msg), Wire: slices.Clone(b), Network: network}
	err := r.Msg.Unpack(r.Wire)
	return r, err == nil
}

// A Packet is a UDP packet or a message of a TCP stream to send.
type Packet struct {
	Bytes []byte
	// After is the delay after the query.
	After time.Duration
	// Break closes the connection after one half of the message. It has no effect over UDP.
	Break bool
}

// An Effect returns the packets for a query. The parameter packets has the result of the
// previous effect, and the effect may change it. It is empty if the handler was silent. An
// Effect must be safe for concurrent use.
type Effect func(r Request, packets []Packet) []Packet

// OnUDP applies effects over UDP only.
func OnUDP(effects ...Effect) Effect { return onNetwork(true, effects) }

// OnTCP applies effects over TCP and TLS only.
func OnTCP(effects ...Effect) Effect { return onNetwork(false, effects) }

func onNetwork(udp bool, effects []Effect) Effect {
	return func(r Request, packets []Packet) []Packet {
		if (r.Network == "udp") != udp {
			return packets
		}
		for _, effect := range effects {
			packets = effect(r, packets)
		}
		return packets
	}
}

// Delay sends everything later, by the duration d.
func Delay(d time.Duration) Effect {
	return func(_ Request, packets []Packet) []Packet {
		for i := range packets {
			packets[i].After += d
		}
		return packets
	}
}

// Loss loses each packet with probability p. The seed decides which: the same queries in
// the same order lose the same packets.
func Loss(p float64, seed uint64) Effect {
	var mu sync.Mutex
	random := rand.New(rand.NewPCG(seed, 0))
	return func(_ Request, packets []Packet) []Packet {
		mu.Lock()
		defer mu.Unlock()
		return slices.DeleteFunc(packets, func(Packet) bool { return random.Float64() < p })
	}
}

// Jitter sends each packet later, by a random duration below longest, so packets overtake each
// other. The seed decides the durations, as for Loss.
func Jitter(longest time.Duration, seed uint64) Effect {
	var mu sync.Mutex
	random := rand.New(rand.NewPCG(seed, 0))
	return func(_ Request, packets []Packet) []Packet {
		mu.Lock()
		defer mu.Unlock()
		for i := range packets {
			packets[i].After += time.Duration(random.Int64N(int64(longest)))
		}
		return packets
	}
}

// Sometimes applies effect with probability p. The seed decides when, as for Loss.
func Sometimes(p float64, seed uint64, effect Effect) Effect {
	var mu sync.Mutex
	random := rand.New(rand.NewPCG(seed, 0))
	return func(r Request, packets []Packet) []Packet {
		mu.Lock()
		has := random.Float64() < p
		mu.Unlock()
		if !has {
			return packets
		}
		return effect(r, packets)
	}
}

// Break closes the connection in the middle of each reply over TCP.
func Break(_ Request, packets []Packet) []Packet {
	for i := range packets {
		packets[i].Break = true
	}
	return packets
}

// Drop sends nothing. OnUDP(Drop) is a black hole that answers over TCP.
func Drop(Request, []Packet) []Packet { return nil }

// Duplicate sends everything n times.
func Duplicate(n int) Effect {
	return func(_ Request, packets []Packet) []Packet { return slices.Repeat(packets, n) }
}

// Cut removes the last n bytes of each packet, without setting TC. With a small n the reply
// ends within a record.
func Cut(n int) Effect {
	return func(_ Request, packets []Packet) []Packet {
		for i, p := range packets {
			packets[i].Bytes = p.Bytes[:max(len(p.Bytes)-n, 0)]
		}
		return packets
	}
}

// Raw replaces the handler's reply. It sends the messages that the function replies
// returns for the query, which is in wire form. replies must be safe for concurrent use.
func Raw(replies func(query []byte) [][]byte) Effect {
	return func(r Request, _ []Packet) []Packet {
		var packets []Packet
		for _, b := range replies(r.Wire) {
			packets = append(packets, Packet{Bytes: b})
		}
		return packets
	}
}

// First sends the result of effect for each reply, and then the unchanged reply.
func First(effect Effect) Effect {
	return func(r Request, packets []Packet) []Packet {
		changed := make([]Packet, len(packets))
		for i, p := range packets {
			changed[i] = Packet{Bytes: slices.Clone(p.Bytes), After: p.After, Break: p.Break}
		}
		return append(effect(r, changed), packets...)
	}
}

// WrongQuestion replies with NXDOMAIN and the right ID, but to another question, for a name below invalid, as a forger
// would. A test can notice from the NXDOMAIN that the agent has accepted the reply.
func WrongQuestion(r Request, _ []Packet) []Packet {
	reply := newReply(r.Msg)
	reply.Rcode = dns.RcodeNameError
	for i := range reply.Question {
		reply.Question[i].Name = "other.invalid."
	}
	wire, err := reply.Pack()
	if err != nil {
		return nil // a parsed message can be packed
	}
	return []Packet{{Bytes: wire}}
}
