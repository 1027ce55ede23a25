package upstream

import "testing"

// F4: which server is asked first.
func TestRank(t *testing.T) {
	t.Parallel()
	runSchedules(t, []scheduleTest{
		{name: "rule 3: the first that is up", servers: []standing{up, up}, want: "send 0, wake at 50ms"},
		{name: "rule 3: up before silent", servers: []standing{silent, up}, want: "send 1, wake at 50ms"},
		{name: "rule 3: silent before down", servers: []standing{down, silent}, want: "send 1, wake at 50ms"},
		{name: "rule 3: of silent ones the first", servers: []standing{silent, silent}, want: "send 0, wake at 50ms"},
		{name: "rule 3: the order of configuration, not time", servers: []standing{up90ms, up}, want: "send 0, wake at 100ms"},
		{name: "rule 3: fastest", servers: []standing{up90ms, up}, options: Options{Fastest: true}, want: "send 1, wake at 50ms"},
		{name: "rule 3: about as fast as the fastest", servers: []standing{up12ms, up}, options: Options{Fastest: true}, want: "send 0, wake at 50ms"},
		{
			name: "rule 3: looping is not asked", servers: []standing{looping, up}, want: "send 1, wake at 50ms",
			steps: []step{{50 * ms, wake, "hedge 1, send 1, wake at 150ms"}},
		},
		{name: "rule 3: all looping", servers: []standing{looping, looping}, want: "no reply"},
		{
			name: "rule 3: found to loop meanwhile", servers: []standing{up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{50 * ms, stands(0, looping), "wake at 50ms"},
				{50 * ms, wake, "hedge 1, send 1, wake at 100ms"},
				{60 * ms, stands(1, looping), "wake at 100ms"},
				{100 * ms, wake, "no reply"},
			},
		},
	})
}
