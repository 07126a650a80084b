#include <fcntl.h>
#include <gtest/gtest.h>

#include <thread>

#include "net/hmac.h"
#include "net/socket.h"

namespace ronde {
namespace {

TEST(Hmac, MatchesThePublishedVectors) {
  // FIPS 180-4 examples and RFC 4231, test cases 1, 2 and 6.
  EXPECT_EQ(Hex(Sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Hex(Sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Hex(HmacSha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(Hex(HmacSha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(Hex(HmacSha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_TRUE(EqualSecrets("ab", "ab"));
  EXPECT_FALSE(EqualSecrets("ab", "ac"));
  EXPECT_NE(RandomBytes(16), RandomBytes(16));
}

TEST(Socket, FramesAreCheckedBeforeAnythingIsAllocated) {
  auto listener = Listen("tcp:127.0.0.1:0");
  ASSERT_TRUE(listener.ok());
  auto address = BoundAddress(listener.value(), "tcp:127.0.0.1:0").value();
  auto client = Dial(address, After(5));
  auto server = Accept(listener.value(), After(5));
  ASSERT_TRUE(client.ok() && server.ok());
  std::string big(3 << 20, 'x');
  std::thread sender([&] { EXPECT_TRUE(SendFrame(client.value(), big, After(5)).ok()); });
  EXPECT_EQ(RecvFrame(server.value(), 4 << 20, After(5)).value(), big);
  sender.join();
  ASSERT_TRUE(SendFrame(client.value(), "12345", After(5)).ok());
  EXPECT_EQ(RecvFrame(server.value(), 4, After(5)).error().code(), Code::kTransport);
}

TEST(Socket, WaitsEndAtTheirDeadlineAndAClosedPeerIsAnError) {
  auto listener = Listen("unix:@ronde-test-" + Hex(RandomBytes(6)));
  ASSERT_TRUE(listener.ok());
  auto start = Now();
  EXPECT_EQ(Accept(listener.value(), After(0.05)).error().code(), Code::kTimeout);
  EXPECT_LT(Seconds(Now() - start), 1);
  EXPECT_FALSE(Dial("unix:@ronde-test-nobody", After(1)).ok());
  EXPECT_EQ(Dial("http://x", After(1)).error().code(), Code::kArgument);
  EXPECT_EQ(Listen("unix:/" + std::string(200, 'x')).error().code(), Code::kArgument);
}

TEST(Socket, AHostNameIsTriedAtAllItsAddresses) {
  auto listener = Listen("tcp:127.0.0.1:0");  // "localhost" may be ::1 first
  auto address = BoundAddress(listener.value(), "tcp:localhost:0").value();
  auto client = Dial(address, After(5));
  EXPECT_TRUE(client.ok()) << client.error().message();
}

TEST(Socket, NoneIsInheritedByOtherProgrammes) {
  auto listener = Listen("tcp:127.0.0.1:0");
  auto address = BoundAddress(listener.value(), "tcp:127.0.0.1:0").value();
  auto client = Dial(address, After(5));
  auto server = Accept(listener.value(), After(5));
  for (const Fd* fd : {&listener.value(), &client.value(), &server.value()}) {
    EXPECT_TRUE(fcntl(fd->get(), F_GETFD) & FD_CLOEXEC);
    EXPECT_TRUE(fcntl(fd->get(), F_GETFL) & O_NONBLOCK);
  }
}

TEST(Socket, StartedDialsTellTheirOutcome) {
  auto listener = Listen("tcp:127.0.0.1:0");
  auto address = BoundAddress(listener.value(), "tcp:127.0.0.1:0").value();
  auto client = StartDial(address);
  ASSERT_TRUE(client.ok() && WaitWritable(client->get(), After(5)));
  EXPECT_TRUE(DialOutcome(client.value()).ok());
  listener.value() = Fd();
  auto refused = StartDial(address);
  if (refused.ok()) {  // else it was refused at once
    ASSERT_TRUE(WaitWritable(refused->get(), After(5)));
    EXPECT_FALSE(DialOutcome(refused.value()).ok());
  }
}

TEST(Interfaces, SubnetsAreComparedBitByBit) {
  InterfaceAddress four{"a", "10.1.128.5", 17, false}, six{"b", "fd00:1::5", 64, false};
  EXPECT_TRUE(InSubnet(four, "10.1.255.1"));
  EXPECT_FALSE(InSubnet(four, "10.1.127.1"));
  EXPECT_TRUE(InSubnet(six, "fd00:1::9:9"));
  EXPECT_FALSE(InSubnet(six, "fd00:2::9"));
  EXPECT_FALSE(InSubnet(six, "10.1.128.5"));
  EXPECT_FALSE(InSubnet(four, "nonsense"));
  bool loopback = false;
  for (const auto& item : InterfaceAddresses()) {
    if (item.address != "127.0.0.1") continue;
    loopback = true;
    EXPECT_TRUE(item.loopback);
    EXPECT_EQ(item.prefix, 8);
  }
  EXPECT_TRUE(loopback);
}

TEST(Socket, PassesDescriptors) {
  std::string address = "unix:@ronde-test-" + Hex(RandomBytes(6));
  auto listener = Listen(address);
  auto client = Dial(address, After(5));
  auto server = Accept(listener.value(), After(5));
  ASSERT_TRUE(client.ok() && server.ok());
  EXPECT_TRUE(SameUser(server.value()));
  auto pair = Listen("tcp:127.0.0.1:0");
  ASSERT_TRUE(SendDescriptors(client.value(), {pair->get(), pair->get()}, After(5)).ok());
  auto received = RecvDescriptors(server.value(), 2, After(5));
  ASSERT_TRUE(received.ok());
  EXPECT_EQ(BoundAddress(received.value()[1], "tcp:127.0.0.1:0").value(),
            BoundAddress(pair.value(), "tcp:127.0.0.1:0").value());
}

}  // namespace
}  // namespace ronde
