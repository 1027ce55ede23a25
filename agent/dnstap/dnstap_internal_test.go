package dnstap

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
)

// A target is a unix socket or a TCP address, and its text is read back as it was.
func TestTarget(t *testing.T) { // R20
	t.Parallel()
	for text, ok := range map[string]bool{
		"": true, "unix:///run/dnstap.sock": true, "tcp://198.51.100.9:6000": true, "tcp://[2001:db8::9]:6000": true, "tcp://vector.logs:6000": true,
		"unix://run/dnstap.sock": false, "unix:///": false, "unix:/run/dnstap.sock": false, "/run/dnstap.sock": false, "unix:///" + strings.Repeat("x", 107): false,
		"tcp://:6000": false, "tcp://198.51.100.9": false, "tcp://198.51.100.9:0": false, "tcp://198.51.100.9:65536": false, "tcp://198.51.100.9:dns": false,
		"udp://198.51.100.9:6000": false, "198.51.100.9:6000": false,
	} {
		var target Target
		err := target.UnmarshalText([]byte(text))
		if (err == nil) != ok {
			t.Errorf("%q: %v", text, err)
		}
		if ok && target.String() != text {
			t.Errorf("%q is read as %q", text, target)
		}
		if !ok && target != (Target{}) {
			t.Errorf("%q: %q in spite of an error", text, target)
		}
	}
}

// A control frame is of the kind that is expected, whatever its fields are.
func TestExpect(t *testing.T) { // R20
	t.Parallel()
	frame := func(kind byte, fields string) string {
		return "\x00\x00\x00\x00\x00\x00\x00" + string(rune(4+len(fields))) + "\x00\x00\x00" + string(rune(kind)) + fields
	}
	for text, want := range map[string]error{
		frame(controlAccept, ""):                           nil,
		frame(controlAccept, "\x00\x00\x00\x01\x00\x00"):   nil,
		frame(controlFinish, ""):                           errNoControl,
		"HTTP/1.1 400 Bad Request\r\n\r\n":                 errNoControl,
		"\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x01": errNoControl,
		"\x00\x00\x00\x00\x00\x00\x02\x01\x00\x00\x00\x01": errNoControl,
		frame(controlAccept, "more")[:14]:                  io.EOF,
		"":                                                 io.EOF,
	} {
		if err := expect(strings.NewReader(text), controlAccept); !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", text, err, want)
		}
	}
	const finish = 5 // in Frame Streams
	if err := expect(strings.NewReader(frame(finish, "")), controlFinish); err != nil {
		t.Errorf("FINISH: %v", err)
	}
}

// FuzzControl: whatever a receiver sends is read without a panic.
func FuzzControl(f *testing.F) { // R20
	for _, kind := range []uint32{controlAccept, controlStart, controlReady, controlFinish} {
		f.Add(control(kind))
	}
	f.Add([]byte("\x00\x00\x00\x00\x00\x00\x00\x0c\x00\x00\x00\x01\x00\x00\x00\x01\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, frame []byte) {
		if err := expect(bytes.NewReader(frame), controlAccept); err == nil && frame[11] != controlAccept {
			t.Errorf("a frame of another kind: %q", frame)
		}
	})
}
