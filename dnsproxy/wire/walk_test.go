package wire_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// packed is a message with records in every section, whose names are compressed.
func packed(tb testing.TB) []byte {
	tb.Helper()
	msg := new(dns.Msg).SetQuestion("www.Example.", dns.TypeA)
	msg.Compress = true
	for text, section := range map[string]*[]dns.RR{
		"www.example. 60 A 192.0.2.1":  &msg.Answer,
		"example. 60 NS ns.example.":   &msg.Ns,
		"ns.example. 60 A 192.0.2.53":  &msg.Extra,
		"other.test. 60 A 192.0.2.100": &msg.Answer,
	} {
		rr, err := dns.NewRR(text)
		if err != nil {
			tb.Fatal(err)
		}
		*section = append(*section, rr)
	}
	msg.SetEdns0(1232, true)
	b, err := msg.Pack()
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// FuzzWalk compares what is walked with what the DNS library unpacks. Names that the walk
// accepts may be more than the library accepts only in the number of pointers.
func FuzzWalk(f *testing.F) {
	f.Add(packed(f))
	f.Add(packed(f)[:60])
	f.Fuzz(func(t *testing.T, msg []byte) {
		if len(msg) < wire.HeaderLen {
			return
		}
		end, err := wire.WalkQuestions(msg)
		if err != nil {
			return
		}
		w := wire.Walk(msg, end)
		for w.Next() {
			_, fixed, err := dns.UnpackDomainName(msg, w.Owner)
			if err != nil || fixed != w.Fixed {
				if err == nil || !strings.Contains(err.Error(), "pointers") {
					t.Fatalf("the owner at %d of %x is walked to %d, unpacked to %d: %v", w.Owner, msg, w.Fixed, fixed, err)
				}
				continue
			}
			if w.Section < wire.AnswerSection || w.Section > wire.AdditionalSection || w.End > len(msg) {
				t.Fatalf("%+v", w)
			}
		}
		if total := wire.Count(msg, 1) + wire.Count(msg, 2) + wire.Count(msg, 3); total == 0 && w.Err != nil {
			t.Fatalf("no records, and %v", w.Err)
		}
	})
}

func TestWalk(t *testing.T) {
	t.Parallel()
	msg := packed(t)
	end, err := wire.WalkQuestions(msg)
	if err != nil {
		t.Fatal(err)
	}
	var sections, types []int
	w := wire.Walk(msg, end)
	for w.Next() {
		sections, types = append(sections, w.Section), append(types, int(w.Type()))
	}
	if w.Err != nil || w.End != len(msg) {
		t.Errorf("walked to %d of %d: %v", w.End, len(msg), w.Err)
	}
	for i, want := range []int{wire.AnswerSection, wire.AnswerSection, wire.AuthoritySection, wire.AdditionalSection, wire.AdditionalSection} {
		if sections[i] != want {
			t.Errorf("record %d is in section %d, want %d", i, sections[i], want)
		}
	}
	if types[2] != int(dns.TypeNS) || types[4] != int(dns.TypeOPT) {
		t.Errorf("types %v", types)
	}
	for n := range len(msg) - wire.HeaderLen - 1 {
		cut := msg[:wire.HeaderLen+n]
		end, err := wire.WalkQuestions(cut)
		if err == nil {
			w := wire.Walk(cut, end)
			for w.Next() {
			}
			err = w.Err
		}
		if !errors.Is(err, wire.ErrShort) {
			t.Errorf("%d bytes: %v", len(cut), err)
		}
	}
}

func TestEqualQuestions(t *testing.T) {
	t.Parallel()
	const question = "\x03www\x07example\x00\x00\x01\x00\x01"
	for other, want := range map[string]bool{
		question:                                 true,
		"\x03WWW\x07eXample\x00\x00\x01\x00\x01": true,
		"\x03wwx\x07example\x00\x00\x01\x00\x01": false,
		"\x03www\x07example\x00\x00\x41\x00\x01": false, // no letter
		"\x03www\x07example\x00\x00\x01\x00":     false,
		"":                                       false,
	} {
		if got := wire.EqualQuestions([]byte(question), []byte(other)); got != want {
			t.Errorf("%q: %v", other, got)
		}
	}
	if wire.EqualQuestions(nil, nil) {
		t.Error("there is no question to compare")
	}
}

func TestOPT(t *testing.T) {
	t.Parallel()
	query := append([]byte{0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}, "\x03www\x00\x00\x01\x00\x01"...)
	if wire.EndsInOPT(query) {
		t.Error("there is no OPT record")
	}
	for _, do := range []uint32{0, wire.OPTDO} {
		with := wire.AppendOPT(bytes.Clone(query), 1232, do)
		wire.PutCount(with, wire.AdditionalSection, 1)
		msg := new(dns.Msg)
		if err := msg.Unpack(with); err != nil || msg.IsEdns0() == nil || msg.IsEdns0().UDPSize() != 1232 || msg.IsEdns0().Do() != (do != 0) {
			t.Errorf("%v: %v", err, msg)
		}
		if !wire.EndsInOPT(with) || wire.WantsDNSSEC(with) != (do != 0) {
			t.Errorf("%x: OPT %v, DO %v", with, wire.EndsInOPT(with), wire.WantsDNSSEC(with))
		}
		if without := wire.CutOPT(with); !bytes.Equal(without, query) {
			t.Errorf("%x, want %x", without, query)
		}
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	options := wire.AppendExtendedError(nil, dns.ExtendedErrorCodeBlocked, "why")
	options = append(options, 0, byte(dns.EDNS0COOKIE), 0, 1, 7)
	code, option, rest, ok := wire.CutOption(options)
	if !ok || code != dns.EDNS0EDE || wire.HopByHop(code, option) || string(option) != "\x00\x0f\x00\x05\x00\x0fwhy" {
		t.Errorf("code %d, %x, %v", code, option, ok)
	}
	if code, option, rest, ok = wire.CutOption(rest); !ok || !wire.HopByHop(code, option) || len(option) != 5 || len(rest) != 0 {
		t.Errorf("code %d, %x before %x, %v", code, option, rest, ok)
	}
	for n := range options {
		if _, _, _, ok := wire.CutOption(options[:n]); ok != (n >= 9) {
			t.Errorf("%d bytes: %v", n, ok)
		}
	}
}
