package intake

import (
	"bytes"
	"io"
	"math/rand/v2"
	"testing"

	"golang.org/x/net/http2"
)

// follow returns what frames finds in bytes that arrive in pieces.
func follow(stream []byte, piece func() int) (count, data int) {
	f := newFrames()
	for len(stream) > 0 {
		n := min(len(stream), max(1, piece()))
		c, d := f.read(stream[:n])
		count, data, stream = count+c, data+d, stream[n:]
	}
	return count, data
}

func randomPiece() int { return 1 + rand.IntN(30) } //nolint:gosec // not for security

// The DATA frames of a connection are found, however they arrive.
func TestFrames(t *testing.T) {
	var stream bytes.Buffer
	_, _ = io.WriteString(&stream, http2.ClientPreface)
	framer := http2.NewFramer(&stream, nil)
	count, data := 0, 0
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(framer.WriteSettings(http2.Setting{ID: http2.SettingEnablePush, Val: 0}))
	for range 200 {
		content := make([]byte, rand.IntN(100)) //nolint:gosec // not for security
		check(framer.WritePing(false, [8]byte{0, 0, 1, 0, 8}))
		check(framer.WriteData(1, false, content))
		check(framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 3, BlockFragment: content, EndHeaders: true}))
		count, data = count+1, data+len(content)
	}
	for range 10 {
		if gotCount, gotData := follow(stream.Bytes(), randomPiece); gotCount != count || gotData != data {
			t.Errorf("%d frames with %d bytes, want %d with %d", gotCount, gotData, count, data)
		}
	}
}

// FuzzFrames finds the same frames in any bytes, however they arrive.
func FuzzFrames(f *testing.F) {
	f.Add([]byte{0, 0, 3, 0, 8, 0, 0, 0, 1, 200, 'x', 'x', 0, 0, 0, 0, 8, 0, 0, 0, 1})
	f.Fuzz(func(t *testing.T, data []byte) {
		stream := append([]byte(http2.ClientPreface), data...)
		count, size := follow(stream, func() int { return len(stream) })
		if count < 0 || size < 0 || size > count*maxFrame {
			t.Errorf("%d frames with %d bytes", count, size)
		}
		if c, s := follow(stream, randomPiece); c != count || s != size {
			t.Errorf("%d frames with %d bytes, and in pieces %d with %d", count, size, c, s)
		}
	})
}
