package agent_test

import (
	"bytes"
	"runtime/metrics"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// freed returns how often this process has collected garbage to free memory.
func freed() uint64 {
	sample := []metrics.Sample{{Name: "/gc/cycles/forced:gc-cycles"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// The memory of a push that is rejected is freed, too.
func TestMemoryOfRejectedPush(t *testing.T) { // C8
	before := freed()
	server := fakexds.Start(t, fakexds.Options{})
	a := start(t, config(t, server.Addr()))
	server.Push(generation(1))
	a.await(t, true)
	wait.Until(t, "the memory of the start is freed", func() bool { return freed() >= before+2 })
	before = freed()
	version := server.PushBytes(bytes.Repeat([]byte{0xff}, 8<<20))
	if answer, err := server.WaitAnswer(t.Context(), version); err != nil || answer.Rejection() == nil {
		t.Fatalf("answer %v, %v, want a rejection", answer, err)
	}
	wait.Until(t, "the memory of the push is freed", func() bool { return freed() > before })
}
