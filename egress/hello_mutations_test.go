package egress

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Without the instrumentation of a fuzzer, crypto/tls parses over ten times as many ClientHellos a second.
var (
	mutations     = flag.Int("hello.mutations", 20_000, "ClientHellos that TestHelloMutations compares")
	mutationsSeed = flag.Uint64("hello.seed", 1, "seed of the random numbers of TestHelloMutations")
	mutationsFrom = flag.String("hello.corpus", "testdata/fuzz/FuzzHello", "directory with inputs of FuzzHello, which TestHelloMutations changes, too")
)

// E3, E5: the server name of a changed ClientHello is that which crypto/tls finds.
func TestHelloMutations(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(*mutationsSeed, 0)) //nolint:gosec // no secret
	originals := append(corpus(t, *mutationsFrom), flights(t)...)
	valid, named := 0, 0
	for range *mutations {
		b := slices.Clone(originals[random.IntN(len(originals))])
		for range random.IntN(4) {
			b = mutate(random, b, originals)
		}
		if random.IntN(4) == 0 && len(b) > recordHeaderLen {
			b = resplit(b, 1+random.IntN(len(b)))
		}
		name, err := helloName(b)
		want, ok := byCryptoTLS(b)
		if !ok || !onlyHandshake(b) { // it is not valid, or it needs more bytes
			continue
		}
		valid++
		switch {
		case want == "" && !errors.Is(err, errNoName), want != "" && (err != nil || name != want):
			t.Fatalf("%q: %q, %v, but crypto/tls finds %q", b, name, err, want)
		case want != "":
			named++
		}
	}
	t.Logf("%d changed ClientHellos from %d, %d of them valid, %d with a name", *mutations, len(originals), valid, named)
	if named == 0 || named == valid || valid == *mutations {
		t.Error("want valid and malformed ClientHellos, with and without a name")
	}
}

// flights returns ClientHellos of crypto/tls.
func flights(tb testing.TB) [][]byte {
	tb.Helper()
	var all [][]byte
	for _, config := range []*tls.Config{
		{ServerName: "a.example.org"}, {}, {ServerName: "b.example.org", MaxVersion: tls.VersionTLS12},
		{ServerName: "c.example.org", NextProtos: []string{"h2", "http/1.1"}, CurvePreferences: []tls.CurveID{tls.X25519}},
	} {
		config.InsecureSkipVerify = true
		all = append(all, clientHello(tb, config))
	}
	return all
}

// corpus returns the inputs of a fuzz target with one argument of type []byte.
func corpus(tb testing.TB, dir string) [][]byte {
	tb.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) == 0 {
		tb.Fatalf("%s: no inputs, %v", dir, err)
	}
	var all [][]byte
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			tb.Fatal(err)
		}
		_, line, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
		input, err := strconv.Unquote(strings.TrimSuffix(strings.TrimPrefix(line, "[]byte("), ")"))
		if err != nil {
			tb.Fatalf("%s: %v", file, err)
		}
		all = append(all, []byte(input))
	}
	return all
}

// mutate changes bytes, lengths or the order of parts.
func mutate(random *rand.Rand, b []byte, others [][]byte) []byte {
	if len(b) < 4 {
		return append(b, byte(random.Uint32()))
	}
	at := random.IntN(len(b) - 3)
	switch random.IntN(9) {
	case 0:
		b[at] = byte(random.Uint32())
	case 1:
		b[at] ^= 1 << random.IntN(8)
	case 2: // a length that is a little wrong
		binary.BigEndian.PutUint16(b[at:], binary.BigEndian.Uint16(b[at:])+uint16(random.IntN(9))-4) //nolint:gosec // small
	case 3:
		binary.BigEndian.PutUint16(b[at:], uint16(random.IntN(len(b)))) //nolint:gosec // a length
	case 4:
		b = slices.Delete(b, at, at+1+random.IntN(min(16, len(b)-at)))
	case 5:
		b = slices.Insert(b, at, make([]byte, 1+random.IntN(16))...)
	case 6: // a part twice, such as an extension
		end := at + random.IntN(min(64, len(b)-at))
		b = slices.Insert(b, at, slices.Clone(b[at:end])...)
	case 7:
		other := others[random.IntN(len(others))]
		if from := random.IntN(len(other) + 1); from < len(other) {
			b = append(b[:at], other[from:]...)
		}
	default:
		b = b[:at]
	}
	return b
}
